"""psjob: parameter-server training for PyTorch. What a script imports.

import psjob as ps
model, opt = ps.attach(model, opt)        # outside a job: plain torch, nothing changes
for x, y in ps.shard(loader):             # this worker's slice of the data, restartable
    loss = loss_fn(model(x), y); loss.backward(); opt.step(); opt.zero_grad()
"""

import os
from typing import TYPE_CHECKING, Any

from psjob.contract import ENV_ROLE
from psjob.process.version import __version__

if TYPE_CHECKING:
    from psjob.api.attach import attach
    from psjob.api.data import epoch, shard
    from psjob.api.reporting import checkpoint, export, is_first, rank, report, step, wait, world
    from psjob.collectives.mirroring import mirror
    from psjob.collectives.reducing import all_reduce
    from psjob.collectives.runner import PeerLost
    from psjob.embeddings.embedding import Embedding, EmbeddingBag
    from psjob.embeddings.offload import offload_embeddings
    from psjob.embeddings.statetable import Table

__all__ = [
    "__version__", "Embedding", "EmbeddingBag", "PeerLost", "Table", "all_reduce", "attach", "checkpoint", "epoch", "export", "is_first",
    "mirror", "offload_embeddings", "rank", "report", "shard", "step", "wait", "world",
]  # fmt: skip

_HOME = {
    "attach": "api.attach", "shard": "api.data", "epoch": "api.data", "Embedding": "embeddings.embedding",
    "EmbeddingBag": "embeddings.embedding", "offload_embeddings": "embeddings.offload", "mirror": "collectives.mirroring",
    "all_reduce": "collectives.reducing", "PeerLost": "collectives.runner", "Table": "embeddings.statetable",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Late, because a shard that starts tells its peers before it pays for importing torch.
    if name not in __all__:
        raise AttributeError(f"module 'psjob' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"psjob.{_HOME.get(name, 'api.reporting')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


if os.environ.get(ENV_ROLE) == "worker":
    from psjob.process.startup import spare_the_compiler

    spare_the_compiler()
