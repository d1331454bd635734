"""What is measured against what: every row of `make bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A program of `bench/peers` with its words; `env` names its requirements file."""

    title: str
    file: str
    words: tuple[str, ...] = ()
    env: str = ""


@dataclass(frozen=True)
class Measure:
    """`at_least`: how many times faster than the peer psjob is to be (below 1: how much of the peer's speed it must keep)."""

    name: str
    about: str
    ours: Program
    peers: tuple[tuple[Program, float], ...]


def ours(*words: str) -> Program:
    return Program("psjob", "psjob_ps.py", words)


MXNET = Program("MXNet dist_sync", "mxnet_ps.py", env="mxnet")
PASS = Program("the optimizer's own pass", "floor.py", ("--what", "pass"))
ADAM_PASS = Program("one fused Adam pass", "floor.py", ("--what", "pass", "--optimizer", "adam"))
TWO = ("--workers", "2")
MEASURES: Sequence[Measure] = (
    Measure(
        "one-worker", "1 worker, 1 shard, TCP: push 100 MB, SGD, pull 100 MB", ours(),
        (
            (MXNET, 2.5),
            (Program("torch RPC", "rpc.py"), 2.0),
            (Program("TensorFlow PSS", "tensorflow_ps.py", env="tensorflow"), 2.2),
            (Program("Ray actor", "ray_ps.py", env="ray"), 1.0),
            (Program("gloo send/recv as a PS", "gloo.py", ("--what", "ps")), 1.5),
        ),
    ),
    Measure(
        "two-workers", "2 workers, 1 shard, sync, TCP", ours(*TWO),
        (
            (Program("MXNet dist_sync", "mxnet_ps.py", TWO, "mxnet"), 4.0),
            (Program("gloo all_reduce and each rank's SGD", "gloo.py", (*TWO, "--what", "allreduce")), 0.8),
        ),
    ),
    Measure(
        "small-tensors", "10,000 tensors of 10 KB in one cycle", ours("--tensors", "10000"),
        ((Program("psjob, one tensor of 100 MB", "psjob_ps.py", ("--tensors", "1")), 1 / 1.3),),
    ),
    Measure("adam", "Adam on the shard, 1 worker, TCP", ours("--optimizer", "adam"), ((ADAM_PASS, 0.0),)),
    Measure(
        "floor", "how far from memory itself", ours(),
        ((PASS, 0.0), (Program("memcpy of the bytes", "floor.py", ("--what", "memcpy")), 0.0)),
    ),
)  # fmt: skip
