"""psjob: parameter-server training for PyTorch. What a script imports.

import psjob as ps
model, opt = ps.attach(model, opt)        # outside a job: plain torch, nothing changes
for x, y in ps.shard(loader):             # this worker's slice of the data, restartable
    loss = loss_fn(model(x), y); loss.backward(); opt.step(); opt.zero_grad()
"""

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from psjob.contract import ENV_ROLE
from psjob.process.version import __version__

if TYPE_CHECKING:
    from psjob.api.attach import attach
    from psjob.api.clipping import clip_grad_norm_
    from psjob.api.data import epoch, shard
    from psjob.api.epochs import epochs, state
    from psjob.api.pipelining import lazy, pipeline
    from psjob.api.reporting import checkpoint, export, is_first, rank, report, step, wait, world
    from psjob.collectives.mirroring import mirror
    from psjob.collectives.reducing import all_reduce
    from psjob.collectives.runner import PeerLost
    from psjob.embeddings.embedding import Embedding, EmbeddingBag
    from psjob.embeddings.offload import offload_embeddings
    from psjob.embeddings.statetable import Table

__all__ = [
    "__version__", "Embedding", "EmbeddingBag", "PeerLost", "Table", "all_reduce", "attach", "checkpoint", "clip_grad_norm_", "epoch",
    "epochs", "export", "is_first", "lazy", "mirror", "offload_embeddings", "pipeline", "rank", "report", "shard", "state", "step", "wait",
    "world",
]  # fmt: skip

_HOME = {
    "attach": "api.attach", "clip_grad_norm_": "api.clipping", "shard": "api.data", "epoch": "api.data",
    "epochs": "api.epochs", "state": "api.epochs",
    "Embedding": "embeddings.embedding", "EmbeddingBag": "embeddings.embedding", "offload_embeddings": "embeddings.offload",
    "mirror": "collectives.mirroring", "all_reduce": "collectives.reducing", "PeerLost": "collectives.runner",
    "Table": "embeddings.statetable", "lazy": "api.pipelining", "pipeline": "api.pipelining",
}  # fmt: skip


_CLIENT = {"Client": "blocking", "AsyncClient": "client"}
"""What the distribution psjob-client adds, by module of its room sdk: found when it is asked for, never imported before."""


def __getattr__(name: str) -> Any:
    # Late, because a shard that starts tells its peers before it pays for importing torch.
    if name not in __all__ and name not in _CLIENT:
        raise AttributeError(f"module 'psjob' has no attribute {name!r}")
    import importlib

    if name in _CLIENT:
        try:
            found = getattr(importlib.import_module(f"psjob_client.sdk.{_CLIENT[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "psjob_client":
                raise
            raise ImportError(
                f"psjob.{name} is in the distribution psjob-client, which is not installed: pip install 'psjob[client]'"
            ) from None
        globals()[name] = found
        return found
    module = importlib.import_module(f"psjob.{_HOME.get(name, 'api.reporting')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from importlib.util import find_spec

    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*dunders, *__all__, *(_CLIENT if find_spec("psjob_client") else ()), "integrations"})


class _Face(ModuleType):
    """Keeps `psjob.shard`, `checkpoint` and `pipeline` what a script calls: imports of folders of these names would put these there."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face

if os.environ.get(ENV_ROLE) == "worker":
    from psjob.process import startup as _startup

    _startup.begin(os.environ)
