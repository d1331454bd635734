"""`psjob crd`: the CustomResourceDefinition on standard output."""

from __future__ import annotations

import typer

from psjob_operator.api.crd import crd_yaml


def crd() -> None:
    """Print the CRD of PSTrainingJob, ready for `kubectl apply -f -`."""
    typer.echo(crd_yaml(), nl=False)
