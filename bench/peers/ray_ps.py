"""A parameter server as a Ray actor with numpy arrays, as Ray's own example has it; the answer, which lies in Ray's read-only store, is
copied into the worker's weights."""

from __future__ import annotations

import os
from typing import Any

import clock
import numpy


def main() -> None:
    words = clock.asked(__doc__)
    os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    size = words.megabytes * 250_000

    @ray.remote
    class Server:
        def __init__(self) -> None:
            self.weights = numpy.zeros(size, dtype=numpy.float32)

        def push_pull(self, grad: Any) -> Any:
            self.weights -= numpy.float32(clock.RATE) * grad
            return self.weights

    server: Any = Server.remote()
    grad, weights = numpy.ones(size, dtype=numpy.float32), numpy.zeros(size, dtype=numpy.float32)

    def cycle() -> None:
        numpy.copyto(weights, ray.get(server.push_pull.remote(grad)))

    found = clock.cycles(cycle, words.seconds)
    clock.check((float(weights[at]) for at in (0, -1)), clock.moved(found))
    ray.shutdown()
    clock.answer(found)


if __name__ == "__main__":
    main()
