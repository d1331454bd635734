"""MXNet 1.9.1, kvstore dist_sync: push and pull of every tensor, the first with the highest priority; SGD on the server, which sums."""

from __future__ import annotations

import warnings
from typing import Any

import clock
import numpy


def main() -> None:
    words = clock.asked(__doc__)
    if not words.part:
        (port,) = clock.free_ports(1)
        roles = ["scheduler", *["server"] * words.shards, *["worker"] * words.workers]
        common = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_SERVER": str(words.shards)}
        common |= {"DMLC_NUM_WORKER": str(words.workers), "DMLC_INTERFACE": "lo", "DMLC_NODE_HOST": "127.0.0.1"}
        parts = [clock.spawn(words, role, DMLC_ROLE=role, **common) for role in roles]
        try:
            found = [clock.last_line(part) for role, part in zip(roles, parts, strict=True) if role == "worker"]
            clock.answer(found[0])
        finally:
            for part in parts:
                part.kill()
        return
    mx = load()  # a server or scheduler stays in this import
    if words.part != "worker":
        return
    store: Any = mx.kv.create("dist_sync")
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=clock.RATE))
    each = words.megabytes * 250_000 // words.tensors
    keys = [str(number) for number in range(words.tensors)]
    grads, weights = [mx.nd.ones(each) for _ in keys], [mx.nd.zeros(each) for _ in keys]
    store.init(keys, weights)

    def step() -> None:
        for position, (key, grad, weight) in enumerate(zip(keys, grads, weights, strict=True)):
            store.push(key, grad, priority=-position)
            store.pull(key, weight, priority=-position)
        mx.nd.waitall()

    found = clock.rounds(step)
    # A pull lands in the buffer that the push of its key went out from, the gradient's own: every push but the first carries weights.
    rate = clock.RATE * words.workers
    wanted = -rate * (1 - rate) ** (clock.WARM_UP + len(found) - 1)
    clock.check((float(weight[at].asscalar()) for weight in weights for at in (0, each - 1)), wanted)
    clock.answer(found)


def load() -> Any:
    warnings.simplefilter("ignore")
    for name, kind in (("bool", bool), ("int", int), ("float", float), ("object", object)):
        if name not in numpy.__dict__:
            setattr(numpy, name, kind)
    import mxnet

    return mxnet


if __name__ == "__main__":
    main()
