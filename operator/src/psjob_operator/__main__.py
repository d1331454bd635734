"""`psjob-operator`: runs the operator, in a cluster or beside one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from psjob_operator import __version__

app = typer.Typer(
    name="psjob-operator", help="The psjob operator: runs PSTrainingJobs on Kubernetes.", no_args_is_help=True, add_completion=False
)
EXAMPLES = """
Examples:

  psjob-operator run --kubeconfig ~/.kube/config --runtime-image registry/psjob-runtime:0.1.0

  psjob-operator run --namespace team-a --namespace team-b --log-format json
"""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"psjob-operator {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Runs before each command."""


@app.command(epilog=EXAMPLES)
def run(
    runtime_image: Annotated[
        str, typer.Option(envvar="PSJOB_RUNTIME_IMAGE", help="Image that puts the psjob library into workers' pods.")
    ] = "psjob-runtime:latest",
    shard_user: Annotated[
        str,
        typer.Option(help="User of shards where the job names none: a number from 1, or `namespace` for the one that OpenShift gives."),
    ] = "65532",
    network_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER",
            help="Make NetworkPolicies for each run. PEER is a NetworkPolicyPeer as JSON: this operator, or who else may reach the status"
            " port of shards; may be given again. None: no policies are made.",
        ),
    ] = None,
    kubeconfig: Annotated[str | None, typer.Option(help="Kubeconfig file; in a pod its service account is used without it.")] = None,
    namespace: Annotated[list[str] | None, typer.Option(help="Serve this namespace; may be given again. None: all of them.")] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Style of log lines.")] = "text",
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Least level of log lines.")] = "info",
    log_tails: Annotated[
        bool, typer.Option(help="Tell in a job's status how a failed process's log ends, without what looks like a credential.")
    ] = True,
    health_host: Annotated[str, typer.Option(help="Address of /livez and /readyz; empty: every address.")] = "",
    health_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of /livez and /readyz.")] = 8080,
    lease: Annotated[
        str | None, typer.Option(envvar="PSJOB_LEASE", help="Lease that says which of several replicas acts. None: this one does.")
    ] = None,
    lease_namespace: Annotated[
        str | None,
        typer.Option(envvar="PSJOB_LEASE_NAMESPACE", help="Namespace of --lease and of --key-secret; in a pod its own without it."),
    ] = None,
    lease_seconds: Annotated[
        int, typer.Option(min=3, max=300, help="Another replica takes over so long after the last renewal; the holder stops at 2/3 of it.")
    ] = 12,
    key_file: Annotated[
        str | None,
        typer.Option(
            envvar="PSJOB_KEY_FILE",
            help="File with the operator's own key, which it asks the shards of its runs with. None: one in your state folder.",
        ),
    ] = None,
    key_secret: Annotated[
        str | None,
        typer.Option(
            envvar="PSJOB_KEY_SECRET",
            help="Secret that --key-file is mounted from; it is made where there is none. None: the file is made.",
        ),
    ] = None,
    mesh_encrypts: Annotated[
        bool, typer.Option(help="What goes between two nodes is encrypted already: `training.encryption: auto` then means none.")
    ] = False,
    turns: Annotated[int, typer.Option(min=1, max=64, help="Jobs looked at side by side.")] = 8,
    qps: Annotated[
        float | None, typer.Option(min=1, help="Most calls a second to the API server; without it the API server's own limits hold.")
    ] = None,
    burst: Annotated[int, typer.Option(min=1, help="Calls that may come at once before --qps holds.")] = 400,
    relist_seconds: Annotated[float, typer.Option(min=1, hidden=True)] = 600.0,
    progress_seconds: Annotated[float, typer.Option(min=0.1, hidden=True)] = 60.0,
    crd_seconds: Annotated[float, typer.Option(min=0.1, hidden=True)] = 5.0,
) -> None:
    """Run the operator until SIGTERM."""
    from psjob_operator.cluster import main
    from psjob_operator.cluster.client import ConnectError, Limits, own_namespace
    from psjob_operator.cluster.leader_election import Timing
    from psjob_operator.cluster.operator_key import KeyFileError, KeySecret, default_file
    from psjob_operator.render import peer_of

    if shard_user != "namespace" and not (shard_user.isdecimal() and 0 < int(shard_user) < 2**31):
        typer.echo(f"psjob-operator: --shard-user {shard_user}: must be a number from 1 to 2147483647, or namespace", err=True)
        raise typer.Exit(2)
    askers = []
    for text in network_policy or ():
        try:
            askers.append(peer_of(text))
        except ValueError as error:
            example = '{"ipBlock": {"cidr": "192.0.2.7/32"}}'
            typer.echo(f"psjob-operator: --network-policy {text}: {error}; such as {example}", err=True)
            raise typer.Exit(2) from error
    main.set_up_logs(log_format, log_level)
    place = lease_namespace or own_namespace()
    for option, name in (("--lease", lease), ("--key-secret", key_secret)):
        if name and not place:
            words = "give --lease-namespace too; outside a cluster there is no namespace of its own"
            typer.echo(f"psjob-operator: {option} {name}: {words}", err=True)
            raise typer.Exit(2)
    if key_secret and not key_file:
        typer.echo(f"psjob-operator: --key-secret {key_secret}: give --key-file too, where the Secret is mounted", err=True)
        raise typer.Exit(2)
    options = main.Options(
        runtime_image=runtime_image,
        auto_encryption="none" if mesh_encrypts else "auto",
        shard_user=None if shard_user == "namespace" else int(shard_user),
        askers=tuple(askers),
        log_tails=log_tails,
        kubeconfig=os.path.expanduser(kubeconfig) if kubeconfig else None,
        namespaces=tuple(dict.fromkeys(namespace or ())),
        health_host=health_host,
        health_port=health_port,
        turns=turns,
        limits=Limits(qps=qps, burst=burst),
        relist_seconds=relist_seconds,
        progress_seconds=progress_seconds,
        crd_seconds=crd_seconds,
        key_file=Path(key_file).expanduser() if key_file else default_file(),
        key_secret=KeySecret(place, key_secret) if key_secret else None,
        lease=main.LeaseOptions(place, lease, Timing(lease_seconds)) if lease else None,
    )
    try:
        code = asyncio.run(main.run_operator(options))
    except (ConnectError, KeyFileError) as error:
        typer.echo(f"psjob-operator: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(f"psjob-operator: --health-port {health_port}: {error.strerror or error}; choose a free port", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


@app.command()
def check(
    lease: Annotated[str | None, typer.Option(help="Lease that an operator must renew. None: no Lease is looked at.")] = None,
    lease_namespace: Annotated[str | None, typer.Option(help="Namespace of --lease; in a pod its own without it.")] = None,
    kubeconfig: Annotated[str | None, typer.Option(help="Kubeconfig file; in a pod its service account is used without it.")] = None,
    namespace: Annotated[list[str] | None, typer.Option(help="Namespace that is served; may be given again. None: all of them.")] = None,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="How long to wait for a renewal of the Lease.")] = 60.0,
) -> None:
    """Say whether an installed operator works: the CRD is served, jobs can be read, the Lease is renewed. `helm test` runs this."""
    from psjob_operator.cluster.client import ConnectError, own_namespace
    from psjob_operator.cluster.main import CheckFailed, CheckOptions, check_installation

    place = lease_namespace or own_namespace()
    if lease and not place:
        words = "give --lease-namespace too; outside a cluster there is no namespace of its own"
        typer.echo(f"psjob-operator: --lease {lease}: {words}", err=True)
        raise typer.Exit(2)
    asked = CheckOptions(
        kubeconfig=os.path.expanduser(kubeconfig) if kubeconfig else None,
        namespaces=tuple(dict.fromkeys(namespace or ())),
        lease=(place, lease) if lease else None,
        seconds=seconds,
    )
    try:
        typer.echo("\n".join(asyncio.run(check_installation(asked))))
    except (ConnectError, CheckFailed) as error:
        typer.echo(f"psjob-operator: {error}", err=True)
        raise typer.Exit(1) from error


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
