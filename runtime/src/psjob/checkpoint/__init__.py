"""Checkpoint files and the manifests that commit them."""

from psjob.process.names import callable_as

callable_as(__name__, "psjob.api.reporting", "checkpoint")
