"""A parameter server by torch RPC (TensorPipe): a call takes a gradient, makes the fused step, and gives the weights back, which are
copied into the worker's. `--what whole`: one call for the model. `--what each`: a call a tensor, all on their way at once. `-tcp`
after it: over TCP alone; TensorPipe's own choice on one host is shared memory and reading the other process's memory."""

from __future__ import annotations

import os

import clock
import torch
from torch.distributed import rpc

HELD: dict[int, tuple[torch.Tensor, torch.optim.Optimizer]] = {}


def push_pull(number: int, grad: torch.Tensor) -> torch.Tensor:
    if number not in HELD:
        weights = torch.zeros_like(grad).requires_grad_()
        HELD[number] = (weights, torch.optim.SGD([weights], lr=clock.RATE, fused=True))
    weights, optimizer = HELD[number]
    weights.grad = grad
    optimizer.step()
    return weights.detach()


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
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"]) if words.what.endswith("-tcp") else None
    rpc.init_rpc(f"rank{words.rank}", rank=words.rank, world_size=2, rpc_backend_options=options)
    if words.rank == 0:
        count = 1 if words.what.startswith("whole") else words.tensors
        each = words.megabytes * 250_000 // count
        grads, weights = [torch.ones(each) for _ in range(count)], [torch.zeros(each) for _ in range(count)]

        def cycle() -> None:
            calls = [rpc.rpc_async("rank1", push_pull, args=(number, grad)) for number, grad in enumerate(grads)]
            for weight, call in zip(weights, calls, strict=True):
                weight.copy_(call.wait())

        found = clock.cycles(cycle, words.seconds)
        clock.check((float(weight[at]) for weight in weights for at in (0, -1)), clock.moved(found))
        clock.answer(found)
    rpc.shutdown()


if __name__ == "__main__":
    main()
