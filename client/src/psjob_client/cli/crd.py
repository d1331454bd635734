"""`psjob crd`: the CustomResourceDefinition on standard output."""

from __future__ import annotations

from psjob_client.cli.output import emit
from psjob_operator.api.crd import crd_yaml


def crd() -> None:
    """Print the CRD of PSTrainingJob, ready for `kubectl apply -f -`."""
    emit(crd_yaml())
