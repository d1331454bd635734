"""A lazy model in stages, each worker under a limit of memory that the kernel holds it to: less than the model, a little above a formula.

What is charged is compared with a run of the same script and a tiny model. What a stage of `layers` wide layers takes beyond that:

    weights (where shards do not lend theirs) + gradients + one more while it is made + (K-k) micro-batches' activations
    + what is kept for the neighbours + REST

- Limits of memory that the kernel holds real processes to: groups of cgroup v1, which root makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.e2e.workloads.running import HERE, ROOT, Ran, faults, manifest, train

pytestmark = pytest.mark.nodes

MEMORY = Path("/sys/fs/cgroup/memory")
REMOVE_SECONDS = 10.0
NOW = 1
"""MCL_CURRENT of mlockall."""


@dataclass(frozen=True)
class Group:
    """Processes whose ids were written into `procs`, and what they start."""

    folder: Path

    @property
    def procs(self) -> Path:
        return self.folder / "cgroup.procs"

    @property
    def peak(self) -> int:
        """Most bytes that were charged at a time, page cache included."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())

    @property
    def refused(self) -> int:
        """How often the limit was met."""
        return int((self.folder / "memory.failcnt").read_text())

    def limit(self, nbytes: int) -> None:
        """More is not given: who asks for it is killed."""
        (self.folder / "memory.limit_in_bytes").write_text(str(nbytes))


@contextlib.contextmanager
def groups(*names: str) -> Iterator[Mapping[str, Group]]:
    """A group for each name, without a limit. Skips where this machine has none."""
    if os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip(f"a limit of memory needs root and memory groups of cgroup v1 at {MEMORY}")
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    inside = next(path for _, controllers, path in lines if "memory" in controllers.split(","))
    own = MEMORY / inside.lstrip("/")
    top = (own if own.is_dir() else MEMORY) / f"psjob-test-{os.getpid()}-{time.monotonic_ns()}"
    made = {name: Group(top / name) for name in names}
    try:
        for group in made.values():
            group.folder.mkdir(parents=True)
        with libraries_in_memory():
            yield made
    finally:
        for folder in [*(group.folder for group in made.values()), top]:
            _remove(folder)


@contextlib.contextmanager
def libraries_in_memory() -> Iterator[None]:
    """What this process has imported stays in memory and is charged to it.

    A file's pages are charged to the process that reads them first. A system that drops pages which were idle would charge them to a group.
    """
    for module in list(sys.modules.values()):
        for path in (getattr(module, "__cached__", None), getattr(module, "__file__", None)):
            with contextlib.suppress(OSError):
                if isinstance(path, str):
                    Path(path).read_bytes()
    libc = ctypes.CDLL(None)
    libc.mlockall(NOW)  # where it is not allowed, peaks are less exact
    try:
        yield
    finally:
        libc.munlockall()


def _remove(folder: Path) -> None:
    """A group is busy until its last process is gone."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


MIB = 1 << 20
TINY = 16
"""A width that takes no memory to speak of."""
MICROBATCHES = 8
EXACT = 1.1
"""Most of the formula that a worker may take."""
REST = 4 * MIB
"""Buffers of the kernel for streams, what the allocator does not give back, threads."""
ROUND = 8 * MIB
"""Beside the formula a limit leaves room for two blocks on their way to and from the shards."""


@dataclass(frozen=True)
class Shape:
    """A model of `stages` times `layers` wide layers, and how it is trained."""

    stages: int
    layers: int
    width: int
    batch: int
    steps: int
    transport: str

    @property
    def layer(self) -> int:
        """Bytes of a wide layer."""
        return 4 * self.width * (self.width + 1)

    @property
    def weights(self) -> int:
        """Bytes of all wide layers."""
        return self.stages * self.layers * self.layer

    def of_stage(self, stage: int) -> int:
        """The formula, in bytes: `kept` are outputs and gradients that a neighbour's next process may ask for again."""
        held = self.layers * self.layer * (1 if self.transport == "auto" else 2) + self.layer + REST
        one = 4 * self.width * self.batch // MICROBATCHES
        activations = (self.layers + 2) * one  # what tanh gives, which the next layer keeps; the stage's input and a copy of it
        kept = MICROBATCHES * one * (1 if stage in (0, self.stages - 1) else 2)
        return held + (self.stages - stage) * activations + kept


def run(
    folder: Path, shape: Shape, width: int, limits: Sequence[int] = (), pace: float = 0.0, hits: Sequence[str] = ()
) -> tuple[list[int], Ran]:
    """Most bytes that were charged to each worker's processes, one after the other, and the run."""
    folder.mkdir()
    names = [f"worker-{rank}" for rank in range(shape.stages)]
    with groups(*names) as made:
        top = made[names[0]].folder.parent
        words = f"stage_memory.py {width} {shape.stages * shape.layers} {shape.steps} {shape.batch} {pace}"
        stages = [{"name": f"part-{stage}", "replicas": 1} for stage in range(shape.stages)]
        for number, stage in enumerate(stages[1:], 1):
            stage["cut"] = str(2 + 2 * shape.layers * number)
        training = {"mode": "sync", "transport": shape.transport, "pipeline": {"microbatches": MICROBATCHES}}
        path = manifest(
            folder, ["sh"], workers=shape.stages, shards=2, stages=stages, training=training,
            checkpoint={"periodSeconds": 3600, "everySteps": 2}, of_shards={"progressDeadlineSeconds": 30},
        )  # fmt: skip
        job = json.loads(path.read_text())
        container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
        # A process that writes 0 goes into the group itself, and all that it starts.
        enter = f"echo 0 > {top}/worker-$PSJOB_INDEX/cgroup.procs; exec {sys.executable} {HERE}/{words}"
        container["command"] = ["sh", "-c", enter]
        container["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})
        path.write_text(json.dumps(job))
        for name, limit in zip(names, limits, strict=False):
            made[name].limit(limit)
        ran = train(folder, path, *faults(*hits))
        peaks = [made[name].peak for name in names]
    return peaks, ran


def alone(folder: Path, shape: Shape) -> dict[str, torch.Tensor]:
    """The same script outside a job."""
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [str(shape.width), str(shape.stages * shape.layers), str(shape.steps), str(shape.batch), "0"]
    cuts = [str(2 + 2 * shape.layers * number) for number in range(1, shape.stages)]
    subprocess.run([sys.executable, str(HERE / "stage_memory.py"), *words, str(MICROBATCHES), *cuts], cwd=folder, env=env, check=True)
    state: dict[str, torch.Tensor] = torch.load(folder / "alone.pt", weights_only=True)
    return state


def same(ran: Ran, expected: dict[str, torch.Tensor]) -> None:
    weights = ran.weights()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), (name, (weights[name] - tensor).abs().max())


def check(tmp_path: Path, shape: Shape, hits: Sequence[str], pace: float) -> list[tuple[int, int, int]]:
    """Train under limits, each fault in a run of its own; by worker most of what it took, the formula and the limit, over its base."""
    run(tmp_path / "first", shape, TINY)  # a file's pages are charged to who reads it first
    base, _ = run(tmp_path / "base", shape, TINY)
    formulas = [shape.of_stage(stage) for stage in range(shape.stages)]
    allowed = [int(EXACT * formula) + ROUND for formula in formulas]
    limits = [before + more for before, more in zip(base, allowed, strict=True)]
    expected = alone(tmp_path / "alone", shape)
    most = [0] * shape.stages
    for number, hit in enumerate(hits):
        peaks, ran = run(tmp_path / f"run-{number}", shape, shape.width, limits, pace if hit else 0.0, [hit] if hit else [])
        assert [recovery["fault"] for recovery in ran.summary["recoveries"]] == ([hit] if hit else [])  # no limit has killed anyone
        same(ran, expected)
        took = [peak - before for peak, before in zip(peaks, base, strict=True)]
        print(hit or "undisturbed", "MiB over the base:", [round(one / MIB, 1) for one in took])
        most = [max(pair) for pair in zip(most, took, strict=True)]
    print("MiB by the formula:", [round(one / MIB, 1) for one in formulas])
    return list(zip(most, formulas, allowed, strict=True))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_worker_never_holds_more_than_its_stage(tmp_path: Path) -> None:
    """The model's weights alone have more bytes than any worker may take, those included that come after one was killed."""
    shape = Shape(stages=2, layers=6, width=1024, batch=64, steps=6, transport="auto")
    for took, _, limit in check(tmp_path, shape, ["kill:worker-0@step=3"], 0.5):
        assert took < limit < shape.weights


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_model_of_two_and_a_half_limits_trains_in_four_stages(tmp_path: Path, transport: str) -> None:
    """Weights alone, where shards lend theirs, which are charged to these; over TCP weights and gradients."""
    shape = Shape(stages=4, layers=25, width=1024, batch=256, steps=4, transport=transport)
    hits = ["", *(f"kill:worker-{rank}@step=2" for rank in range(4)), "kill:shard-1@step=3"]
    found = check(tmp_path, shape, hits, 1.0)
    for took, formula, limit in found:
        assert (1 if transport == "auto" else 2) * shape.weights >= 2.5 * limit
        assert abs(took - formula) < 0.1 * formula
