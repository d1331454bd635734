"""Which jobs a verb means: runs of this machine or jobs of a cluster, told by its options, by the name, or by being kubectl's plugin.

A name of a run in ./.psjob means that run, and every other name a job of the cluster. `--local` and `--folder` always mean this machine;
`--namespace`, `--context`, `--kubeconfig` and `kubectl psjob` always mean the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from psjob_client.jobs.runs import RunSource
from psjob_client.local.errors import BadInput
from psjob_client.sdk.client import AsyncClient

T = TypeVar("T")
KUBECTL = "kubectl"
COMPLETION_SECONDS = 2.0
OneOf = "use one of the two"


@dataclass(frozen=True)
class Where:
    """The options of a verb that say which jobs it means."""

    local: bool = False
    folder: Path | None = None
    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None

    def __post_init__(self) -> None:
        if self.says_local and self._says_cluster:
            raise BadInput(f"--local and --folder mean this machine, --namespace, --context and --kubeconfig a cluster; {OneOf}")

    @property
    def says_local(self) -> bool:
        """This machine was asked for."""
        return self.local or self.folder is not None

    @property
    def says_cluster(self) -> bool:
        """A cluster was asked for."""
        return self._says_cluster or (plugin() and not self.says_local)

    @property
    def _says_cluster(self) -> bool:
        return any(value is not None for value in (self.namespace, self.context, self.kubeconfig))

    @property
    def here(self) -> Path:
        """Where runs of this machine are looked for."""
        return self.folder or Path.cwd()

    def words(self) -> list[str]:
        """The options that say the same again. A run that is found by its name in the current folder needs none."""
        given = {"--folder": self.folder, "-n": self.namespace, "--context": self.context, "--kubeconfig": self.kubeconfig}
        return [word for option, value in given.items() if value is not None for word in (option, str(value))]

    def machine(self) -> AsyncClient:
        """This machine."""
        return AsyncClient.local(self.here)

    def cluster(self) -> AsyncClient:
        """The cluster."""
        return AsyncClient.kube(self.context, self.namespace, self.kubeconfig)

    def of(self, name: str) -> AsyncClient:
        """Where the job of that name is."""
        if self.says_cluster:
            return self.cluster()
        if self.says_local or RunSource(self.here).knows(name) or not has_cluster():
            return self.machine()
        return self.cluster()


def plugin() -> bool:
    """Was this started as `kubectl psjob`?"""
    return Path(sys.argv[0]).name.startswith(KUBECTL)


def has_cluster() -> bool:
    """Is there a kubeconfig, or is this a pod?"""
    from psjob_operator.cluster.client import in_cluster, kubeconfig_path

    return in_cluster(None) or any(Path(path).expanduser().is_file() for path in kubeconfig_path(None).split(os.pathsep))


def plain(name: str) -> str:
    """A job's name, also of `pstrainingjob.psjob.dev/digits`, as `-o name` prints it. Raises BadInput."""
    found = name.rpartition("/")[2]
    if not found or found.startswith("-"):
        raise BadInput(f"{name!r} is no name of a job; give metadata.name of a PSTrainingJob, or a run of `psjob list`")
    return found


def go(client: AsyncClient, work: Coroutine[Any, Any, T]) -> T:
    """Do it, and give the connections back."""

    async def closing() -> T:
        async with client:
            return await work

    return asyncio.run(closing())


def names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: names of jobs that begin so. A cluster that is slow is left out."""
    given = {key: context.params.get(key) for key in ("local", "folder", "namespace", "context", "kubeconfig")}
    found: list[str] = []
    with contextlib.suppress(Exception):
        where = Where(**{key: value for key, value in given.items() if value})
        sources = [where.cluster()] if where.says_cluster else [where.machine()]
        if not where.says_local and not where.says_cluster and has_cluster():
            sources.append(where.cluster())
        for client in sources:
            with contextlib.suppress(Exception):
                jobs = go(client, asyncio.wait_for(client.list(), COMPLETION_SECONDS))
                found += [name for job in jobs for name in dict.fromkeys((job.name, job.id))]
    return [name for name in dict.fromkeys(found) if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a job, or of a run of this machine.", autocompletion=names)]
Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Names of jobs, or of runs of this machine.", autocompletion=names)]
MaybeName = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Name of a job, or of a run of this machine.", autocompletion=names)
]
Local = Annotated[bool, typer.Option("--local", "-l", help="Runs of this machine, in ./.psjob.")]
Folder = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Runs of this machine, in FOLDER/.psjob.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Jobs of this namespace of a cluster; absent: that of the context.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; absent: the current one.")]
Kubeconfig = Annotated[Path | None, typer.Option(help="Kubeconfig file; absent: $KUBECONFIG, or ~/.kube/config.")]
