"""A parameter server by torch RPC (TensorPipe): one call takes the gradient, steps, and gives the weights back."""

from __future__ import annotations

import os
from typing import Any

import clock
import torch
from torch.distributed import rpc

HELD: dict[str, Any] = {}


def push_pull(grad: torch.Tensor) -> torch.Tensor:
    if not HELD:
        HELD["weights"] = torch.zeros_like(grad).requires_grad_()
        HELD["optimizer"] = torch.optim.SGD([HELD["weights"]], lr=1e-3, fused=True)
    HELD["weights"].grad = grad
    HELD["optimizer"].step()
    weights: torch.Tensor = HELD["weights"].detach()
    return weights


def main() -> None:
    words = clock.asked(__doc__)
    if not words.part:
        (port,) = clock.free_ports(1)
        parts = [clock.spawn(words, "rank", rank, port) for rank in (0, 1)]
        found = clock.last_line(parts[0])
        parts[1].communicate(timeout=60)
        clock.answer(found)
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port), "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    rpc.init_rpc(f"rank{words.rank}", rank=words.rank, world_size=2)
    if words.rank == 0:
        grad, weights = torch.ones(words.megabytes * 250_000), torch.zeros(words.megabytes * 250_000)
        clock.answer(clock.cycles(lambda: weights.copy_(rpc.rpc_sync("rank1", push_pull, args=(grad,))), words.seconds))
    rpc.shutdown()


if __name__ == "__main__":
    main()
