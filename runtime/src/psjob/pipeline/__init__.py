"""Pipelines of stages: cutting a model, the order of work on each stage, delays, and one process that runs all stages."""
