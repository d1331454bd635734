"""Checkpoint files and the manifests that commit them."""
