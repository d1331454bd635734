"""TensorFlow ParameterServerStrategy: a chief that coordinates, a worker, a server.

The gradient lies in variables of the worker and crosses to the server, whose fused SGD kernel takes it; the weights cross back and
are assigned to variables of the worker. (A gradient that the graph makes by a fill is made on the server instead: TensorFlow moves
the fill, and one way carries nothing. Bytes over loopback show it.) The whole is one graph, so tensors of both ways overlap.
"""

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
    with tf.device("/job:worker/replica:0/task:0"):
        grads: Any = [tf.Variable(tf.ones([each])) for _ in range(words.tensors)]
        weights: Any = [tf.Variable(tf.zeros([each])) for _ in range(words.tensors)]

    @tf.function
    def step(rate: Any) -> None:
        for variable, grad, weight in zip(variables, grads, weights, strict=True):
            with tf.device("/job:worker/replica:0/task:0"):
                sent = grad.read_value()
            with tf.device(variable.device):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=sent)
                fresh = variable.read_value()
            with tf.device("/job:worker/replica:0/task:0"):
                weight.assign(fresh)

    def cycle() -> None:
        coordinator.schedule(step, args=(tf.constant(clock.RATE),))
        coordinator.join()

    found = clock.cycles(cycle, words.seconds)
    clock.check((float(weights[n][at]) for n in (0, -1) for at in (0, -1)), clock.moved(found))
    clock.answer(found)
    os._exit(0)


if __name__ == "__main__":
    main()
