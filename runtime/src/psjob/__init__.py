"""psjob: parameter-server training for PyTorch. `help(psjob.attach)` tells more of a name, and docs/reference.md has all of them.

In a training script, as `import psjob as ps`:

- attach: hand model and optimizer to the job.
- shard, epochs, state: data, epochs and values that a restart continues with.
- report, wait: numbers for the display; wait for weights that come late.
- checkpoint, export: ask for a checkpoint; write weights to a file.
- rank, world, is_first, step, epoch: where this script is.
- clip_grad_norm_: clip the mean gradient.
- pipeline, lazy: a model that is cut in stages.
- Embedding, EmbeddingBag, Table, offload_embeddings: rows that lie on the shards.
- mirror, all_reduce: sums between workers without a parameter server.
- integrations: accelerate, lightning, transformers.

In a notebook, a test or a script that starts jobs (with psjob-client):

- Client, AsyncClient: Client.local() or Client.kube(), with train, get, list and more.
- Job, AsyncJob: what `train` returns, with wait, logs, phase, load_weights and more.

Exceptions:

- Refused: the script asks for what cannot be done.
- PeerLost: another process of `mirror` or `all_reduce` has gone.
- JobProblem: the base of all that follow, which clients raise.
- NoSuchJob, JobFailed, DeadlinePassed, Conflict, NoWeights: of a job.
- BadManifest, CannotShip: of what is to be trained.
- Unreachable, NotAllowed, NotServed: of a cluster.

Example:
    import psjob as ps
    model, opt = ps.attach(model, opt)        # outside a job: plain torch, nothing changes
    for x, y in ps.shard(loader):             # this worker's slice of the data, restartable
        loss = loss_fn(model(x), y); loss.backward(); opt.step(); opt.zero_grad()
"""

import os
import sys
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from psjob.contract import ENV_ROLE

__version__ = "0.1.0"

if TYPE_CHECKING:
    from psjob import integrations as integrations
    from psjob.api.attach import attach
    from psjob.api.clipping import clip_grad_norm_
    from psjob.api.data import epoch, epochs, shard, state
    from psjob.api.pipelining import lazy, pipeline
    from psjob.api.reporting import checkpoint, export, is_first, rank, report, step, wait, world
    from psjob.collectives.all_reduce import PeerLost, all_reduce, mirror
    from psjob.embeddings.embedding import Embedding, EmbeddingBag, offload_embeddings
    from psjob.embeddings.row_tables import Table
    from psjob.process.errors import Refused
    from psjob_client.problems import (
        BadManifest,
        Conflict,
        DeadlinePassed,
        JobFailed,
        JobProblem,
        NoSuchJob,
        NotAllowed,
        NotServed,
        NoWeights,
        Unreachable,
    )  # fmt: skip
    from psjob_client.sdk.blocking import Client, Job
    from psjob_client.sdk.client import AsyncClient, AsyncJob
    from psjob_client.sdk.manifest import CannotShip

__all__ = [
    "__version__", "Embedding", "EmbeddingBag", "PeerLost", "Refused", "Table", "all_reduce", "attach", "checkpoint", "clip_grad_norm_",
    "epoch", "epochs", "export", "is_first", "lazy", "mirror", "offload_embeddings", "pipeline", "rank", "report", "shard", "state", "step",
    "wait", "world",
]  # fmt: skip

if TYPE_CHECKING or find_spec("psjob_client"):
    __all__ += [
        "AsyncClient", "AsyncJob", "BadManifest", "CannotShip", "Client", "Conflict", "DeadlinePassed", "Job", "JobFailed", "JobProblem",
        "NoSuchJob", "NoWeights", "NotAllowed", "NotServed", "Unreachable",
    ]  # fmt: skip

_HOME = {
    "attach": "api.attach", "clip_grad_norm_": "api.clipping", "shard": "api.data", "epoch": "api.data",
    "epochs": "api.data", "state": "api.data", "Refused": "process.errors",
    "Embedding": "embeddings.embedding", "EmbeddingBag": "embeddings.embedding", "offload_embeddings": "embeddings.embedding",
    "mirror": "collectives.all_reduce", "all_reduce": "collectives.all_reduce", "PeerLost": "collectives.all_reduce",
    "Table": "embeddings.row_tables", "lazy": "api.pipelining", "pipeline": "api.pipelining",
}  # fmt: skip

_CLIENT = {
    "Client": "sdk.blocking", "Job": "sdk.blocking", "AsyncClient": "sdk.client", "AsyncJob": "sdk.client",
    "CannotShip": "sdk.manifest",
    **dict.fromkeys(
        (
            "BadManifest", "Conflict", "DeadlinePassed", "JobFailed", "JobProblem", "NoSuchJob", "NoWeights", "NotAllowed", "NotServed",
            "Unreachable",
        ),
        "problems",
    ),
}  # fmt: skip
"""What the distribution psjob-client adds, by its module: found when it is asked for, never imported before."""

# A type checker that saw __getattr__ would take any name for one of psjob's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Late, because a shard that starts tells its peers before it pays for importing torch.
        import importlib

        if name in _CLIENT:
            value = _of_client(name)
        elif name == "integrations":
            return importlib.import_module("psjob.integrations")
        elif name in __all__:
            value = getattr(importlib.import_module(f"psjob.{_HOME.get(name, 'api.reporting')}"), name)
        else:
            # Its name and object: Python's traceback asks then whether a near name was meant.
            raise AttributeError(f"module 'psjob' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        globals()[name] = value
        return value


def _of_client(name: str) -> object:
    import importlib

    try:
        return getattr(importlib.import_module(f"psjob_client.{_CLIENT[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "psjob_client":
            raise
    from psjob.contract import INSTALL

    raise ImportError(f"psjob.{name} is in the distribution psjob-client, which is not installed: {INSTALL}")


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    # pydoc prints in full what it finds here, thousands of lines with what is torch's: `help(psjob)` is the text at the top.
    return sorted(dunders if _pydoc_asks() else {*dunders, *__all__, "integrations"})


def _pydoc_asks() -> bool:
    """Is it pydoc that has called `dir`, by way of inspect.getmembers?"""
    frame: FrameType | None = sys._getframe()
    for _ in range(4):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == "pydoc":
            return True
    return False


class _Face(ModuleType):
    """Keeps `psjob.shard`, `checkpoint` and `pipeline` what a script calls: imports of folders of these names would put these there."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face

if os.environ.get(ENV_ROLE) == "worker":
    from psjob.process import startup as _startup

    _startup.begin_worker(os.environ)
