"""TensorFlow ParameterServerStrategy: a chief that coordinates, a worker, a server; the gradient is a fill, SGD runs on the server."""

from __future__ import annotations

import json
import os
from typing import Any

import clock


def main() -> None:
    words = clock.asked(__doc__)
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "GRPC_VERBOSITY": "NONE"}
    if not words.part:
        chief, worker, server = (f"127.0.0.1:{port}" for port in clock.free_ports(3))
        cluster = {"chief": [chief], "worker": [worker], "ps": [server]}
        parts = []
        for role in ("ps", "worker", "chief"):
            parts.append(clock.spawn(words, role, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})))
        try:
            clock.answer(clock.last_line(parts[-1]))
        finally:
            for part in parts:
                part.kill()
        return
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if words.part != "chief":
        tf.distribute.Server(resolver.cluster_spec(), job_name=words.part, task_index=0, protocol="grpc", start=True).join()
        return
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    each = words.megabytes * 250_000 // words.tensors
    with strategy.scope():
        variables: Any = [tf.Variable(tf.zeros([each])) for _ in range(words.tensors)]

    @tf.function
    def step(value: Any) -> Any:
        with tf.device("/job:worker/replica:0/task:0"):
            grads = [tf.fill([each], value) for _ in variables]
        total = tf.constant(0.0)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(1e-3 * grad)
            with tf.device("/job:worker/replica:0/task:0"):
                total += tf.reduce_sum(tf.identity(variable))  # one pass, so that all weights do come to the worker
        return total

    def cycle() -> None:
        coordinator.schedule(step, args=(tf.constant(1.0),))
        coordinator.join()

    clock.answer(clock.cycles(cycle, words.seconds))
    os._exit(0)


if __name__ == "__main__":
    main()
