"""What a script computes under torch's DistributedDataParallel, as its library starts it.

As a module: `python -m tests.frameworks.gloo WORLD OUT SCRIPT [WORD …]` runs the script in WORLD processes that find each other as those of
torchrun, and writes the state_dict of its `model` on rank 0 to OUT. `RANK` in a word is the rank.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

from safetensors.torch import save_file

from tests.support.forks import in_ranks


def main() -> None:
    world, out, words = int(sys.argv[1]), os.path.abspath(sys.argv[2]), sys.argv[3:]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    raise SystemExit(in_ranks(world, lambda rank: _rank(rank, world, port, out, words)))


def _rank(rank: int, world: int, port: int, out: str, words: list[str]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
        LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=str(rank), GROUP_RANK=str(rank),  # a node of its own each
    )  # fmt: skip
    sys.argv = [word.replace("RANK", str(rank)) for word in words]
    model = runpy.run_path(words[0], run_name="__main__")["model"]
    if rank == 0:
        model = getattr(model, "module", model)
        save_file({key: value.contiguous().clone() for key, value in model.state_dict().items()}, out)


if __name__ == "__main__":
    main()
