"""Checkpoint files and the manifests that commit them."""

from psjob.names import callable_as

callable_as(__name__, "psjob.reporting", "checkpoint")
