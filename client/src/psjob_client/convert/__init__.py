"""Manifests of other training operators, and a torchrun command, as a PSTrainingJob: pure, with a list of what was left behind."""
