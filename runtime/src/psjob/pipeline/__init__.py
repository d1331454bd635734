"""Pipelines of stages: cutting a model, the order of work on each stage, and delays."""
