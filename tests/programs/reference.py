"""The reference of a program: `python -m tests.programs.reference KIND WORLD OUT SCRIPT [WORD …]`, in which only rank 0 prints.

KIND `ddp`: a program that calls psjob, with these calls replaced by torch.distributed over gloo (`tests.scripts.ddp`). KIND `gloo`: a
program of a library that starts torch's DistributedDataParallel itself (`tests.frameworks.gloo`). Adam and AdamW step by torch's fused
kernel, as shards do: that of a loop over parameters rounds otherwise.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tests.frameworks import gloo
from tests.scripts import ddp

KINDS: dict[str, Any] = {"ddp": ddp, "gloo": gloo}


def main() -> None:
    kind = KINDS[sys.argv.pop(1)]
    plain, attach = kind._rank, ddp.attach

    def quiet(rank: int, *rest: Any) -> None:
        if rank:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        plain(rank, *rest)

    def fused(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *words: Any, **named: Any) -> tuple[Any, Any]:
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            for group in optimizer.param_groups:
                group["fused"] = True
        return attach(model, optimizer, *words, **named)

    kind._rank, ddp.attach = quiet, fused
    kind.main()


if __name__ == "__main__":
    main()
