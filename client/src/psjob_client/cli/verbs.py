"""`psjob suspend` and `psjob resume` (as a kubectl plugin: `kubectl psjob suspend`): one field of a job on a cluster, set with kubectl."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Annotated

import typer

from psjob_client.local.errors import BadInput
from psjob_operator.contract import GROUP, PLURAL

SECONDS = 60
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Its namespace; absent: that of the context.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; absent: the current one.")]


def suspend(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Take a last checkpoint of a job on a cluster and go down to zero pods."""
    _set_suspend(name, True, namespace, context)


def resume(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Go on with a suspended job from its checkpoint."""
    _set_suspend(name, False, namespace, context)


def _set_suspend(name: str, value: bool, namespace: str | None, context: str | None) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise BadInput("this command works through kubectl, which is not in PATH; install it, or set spec.suspend by other means")
    if name.startswith("-"):
        raise BadInput(f"{name!r} is no name of a job; give metadata.name of a PSTrainingJob")
    where = [f"--namespace={namespace}"] if namespace else []
    where += [f"--context={context}"] if context else []
    change = json.dumps({"spec": {"suspend": value}})
    argv = [kubectl, "patch", f"{PLURAL}.{GROUP}", name, "--type=merge", f"--patch={change}", *where]
    try:
        # kubectl says what it did, or in the API server's words why not.
        raise typer.Exit(subprocess.run(argv, timeout=SECONDS, check=False).returncode)
    except subprocess.TimeoutExpired:
        raise BadInput(f"kubectl gave no answer in {SECONDS} s; try `kubectl get {PLURAL}.{GROUP} {name}`") from None
