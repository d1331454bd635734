"""The protocol by seed: every promise holds in every mode, a seed is one history, and a failing one becomes short.

- Recorded runs of the protocol and of simulated trainings: each is what it was, to the last message and the last bit of the weights.
A run of the protocol is: each frame on each stream (its time, sender, receiver, header and body), each order and answer between the
coordinator and a shard, each end of a process, what each commit holds, and how much chance was drawn. A training is: when each push was
decided on, with its clock, worker, staleness and part in the update, and the weights at the end. See `tests.support.goldens`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psjob import codecs, rules
from psjob.codecs.base import CodecKey
from psjob.rules.base import Hyperparameters
from psjob.simulate.engine import Outage, Trace, WorkerSpeeds, simulate
from psjob.simulate.training import Floats, Inner, SimulatedTraining
from psjob.simulate.words import mode_of
from tests.simulation.protocol.cli import Total, main, outcomes
from tests.simulation.protocol.faults import Fault
from tests.simulation.protocol.kernel import Process
from tests.simulation.protocol.mutants import FOUND, ISSUED, OWN, found_at, replayed, table, with_mutant
from tests.simulation.protocol.network import End, Network
from tests.simulation.protocol.plan import CRASHING, DELAYED, MODES, draw
from tests.simulation.protocol.promises import Broken
from tests.simulation.protocol.run import MOST_EVENTS, Outcome, run
from tests.simulation.protocol.shard import SimShard
from tests.simulation.protocol.shrink import shrink
from tests.simulation.protocol.world import World
from tests.support.goldens import Digest, check
from tests.support.soaking import rotating

EACH = 8
"""Seeds a mode in one turn."""
MOST_SEEDS = 4_000
"""So many seeds find every mutant."""
DESIGN = Path(__file__).parents[2] / "docs/design/0001-protocol-machine.md"


@pytest.mark.parametrize("mode", [*MODES, *DELAYED, CRASHING])
def test_promises_hold_in_every_mode(mode: str) -> None:
    broken = {o.plan.seed: f"{o.broken}: {o.detail[:500]}" for o in outcomes(range(EACH), mode, jobs=1) if o.broken}
    assert not broken, f"replay with: python -m tests.simulation --mode {mode} --replay SEED"


@pytest.mark.parametrize("seed", [22627, 24019, 29242])
def test_promises_hold_where_one_was_broken(seed: int) -> None:
    """A final checkpoint whose writer crashed before it could say so, and fences of a coordinator that was lost before workers heard."""
    made = run(draw(seed, CRASHING))
    assert made.broken is None, made.detail


def test_a_crash_alone_sends_nobody_back() -> None:
    """Of shard 0 and of another, one after the other, once training has begun."""
    for seed in range(6):
        crashes = (crash(0, 0.3), crash(1, 0.8), crash(0, 1.2))
        made = run(replace(draw(seed, CRASHING), steps=(20, 20), workers=2, step_seconds=0.1, faults=crashes))
        assert made.broken is None, f"seed {seed}: {made.detail}"
        assert made.counts["taken up"] == 3 and made.counts["restores"] == 0


@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_no_request_for_a_checkpoint_is_lost_with_shard_0(mode: str) -> None:
    """It dies, crashes or is drained about when the request is read, cut and committed. Nothing but the request asks for a checkpoint."""
    for seed, kind in enumerate(("kill", "crash", "drain", "power-cut")):
        who, phase = ("shard", 0), "training"
        faults = (Fault("ask", 1.5, 0.0, who, who, 0.0, phase), *(Fault(kind, at, 1.0, who, who, 0.0, phase) for at in (2.0 + seed, 6.0)))
        plan = replace(draw(seed, mode), shards=2, blocks=2, tables=0, workers=2, steps=(30, 30), step_seconds=0.6)
        made = run(replace(plan, every=None, interval=None, policy="AllWorkers", starts=0.2, faults=faults))
        assert made.broken is None, f"seed {seed}: {made.detail}"
        assert made.counts["answered before the end"], f"seed {seed}"


def crash(shard: int, at: float) -> Fault:
    return Fault("crash", at, 1.0, ("shard", shard), ("shard", shard), 0.0, "training")


def test_a_seed_is_one_history() -> None:
    """In this process, and in one with another seed of hashes."""
    code = "from tests.simulation.protocol import plan, run; print('\\n'.join(run.run(plan.draw(7), traced=True).trace))"
    root = str(Path(__file__).parents[2])
    hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=120, text=True)
    here = run(draw(7), traced=True).trace
    assert len(here) > 50 and other.stdout.splitlines() == here


def small(seed: int) -> Outcome:
    """A seed that breaks a promise, made short."""
    made = run(draw(seed))
    assert made.broken is not None and (made.plan.workers > 2 or made.plan.shards > 2)
    return shrink(made)


def test_a_broken_promise_is_made_short() -> None:
    short = with_mutant("a commit does not wait for one shard", small, 0)
    assert short.broken == "not one snapshot"
    assert (short.plan.workers, short.plan.shards, short.plan.faults) == (2, 2, ())
    assert any("commits manifest" in line for line in short.trace)


def test_the_last_line_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 seeds in ")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [None, CRASHING])
def test_ten_thousand_seeds(mode: str | None) -> None:
    began, total = time.perf_counter(), Total()
    for outcome in outcomes(range(10_000), mode, jobs=min(2, os.cpu_count() or 1)):
        total.add(outcome)
        assert outcome.broken is None, f"seed {outcome.plan.seed}: {outcome.broken}: {outcome.detail[:2000]}"
    seconds = time.perf_counter() - began
    print(total.words(seconds))
    assert seconds <= 600.0
    assert len(total.pairs) >= (150 if mode is None else 100)


def test_every_mutant_has_a_seed_and_its_row_in_the_design() -> None:
    assert list(FOUND) == [*ISSUED, *OWN]
    assert table() in DESIGN.read_text(), "write the table anew with: python -m tests.simulation.protocol.mutants"


@pytest.mark.parametrize("name", FOUND)
def test_a_mutant_breaks_its_promise_at_its_seed(name: str) -> None:
    without = run(FOUND[name].plan)
    assert without.broken is None, f"without the mutant: {without.detail[:500]}"
    assert replayed(name) == FOUND[name].promise


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FOUND)
def test_a_mutant_is_found_by_search(name: str) -> None:
    found = found_at(name, range(MOST_SEEDS), FOUND[name].mode)
    print(f"{name}: {found}")
    assert found is not None, f"no seed below {MOST_SEEDS} finds it"


RUNS = [
    (218, None),  # local: clocks jump, a node and then all lose power, a partition, a lost worker, a process that outlives its successor
    (22, None),  # sync, clipped: a healthy shard is replaced, a slow disk, a full one, all shards are lost
    (184, None),  # async: a switch of the mode, slow links, all shards are lost while the operator is away
    (12, CRASHING),  # sync: a shard's process crashes and continues from memory
    (4, None),  # local-async with a table
    rotating(130, None),  # softsync: a suspension and resume, a drain, an ill disk, broken streams, a process that stands still
    rotating(1, None),  # threshold with a table: drains, partitions, a lost worker, a node without power
    rotating(11, CRASHING),
    rotating(125, None),  # bounded, workers of unequal length
    rotating(142, None),  # local with a quorum
    rotating(397, None),  # backup workers, an ill disk
    rotating(98, None),  # threshold
]


@pytest.mark.parametrize(("seed", "mode"), RUNS)
def test_a_run_of_the_protocol_is_the_recorded_one(seed: int, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, world = Digest(), World(draw(seed, mode))
    now = lambda: round(world.kernel.now, 6)  # noqa: E731

    def carry(network: Network, end: End, frame: Any, size: int, carried: Any = Network.carry) -> None:
        digest.add(now(), end.owner.pod, end.peer.owner.pod, frame, size)
        carried(network, end, frame, size)

    def order(shard: SimShard, body: Mapping[str, Any], stream: int | None, ordered: Any = SimShard.order) -> None:
        digest.add(now(), shard.pod, body)
        ordered(shard, body, stream)

    def answer(shard: SimShard, body: Mapping[str, Any], answered: Any = SimShard.answer) -> None:
        digest.add(now(), body, shard.pod)
        answered(shard, body)

    def end(process: Process, code: int, message: dict[str, Any] | None = None, ended: Any = Process.end) -> None:
        digest.add(now(), process.pod, code, message)
        ended(process, code, message)

    monkeypatch.setattr(Network, "carry", carry)
    monkeypatch.setattr(SimShard, "order", order)
    monkeypatch.setattr(SimShard, "answer", answer)
    monkeypatch.setattr(Process, "end", end)
    world.begin()
    try:
        world.kernel.run(lambda: world.planner.complete or world.planner.failed is not None or world.kernel.steps > MOST_EVENTS, 1e9)
    except Broken as problem:  # pragma: no cover
        pytest.fail(str(problem))
    assert world.planner.complete, world.planner.failed
    for saved in world.saved.values():
        digest.add(saved.step, saved.final, saved.parts, saved.versions, saved.tables, saved.workers, saved.records, saved.files)
    digest.add(world.kernel.steps, world.kernel.random.getstate(), sorted(world.promises.counts.values()))
    check(f"protocol {seed} {mode or ''}".strip(), digest)


class Bowl:
    """Parameters of unequal curvature with noise, whose gradients may go through a codec with error feedback. Only elementwise arithmetic,
    so the bits are those of any machine.
    """

    def __init__(self, codec: str | None, ratio: float, size: int = 96) -> None:
        self._rng = np.random.default_rng(5)
        self._curvature = np.linspace(0.5, 4.0, size, dtype=np.float32)
        self._codec, self._ratio, self._count = None if codec is None else codecs.named(codec), ratio, 0
        self._residual = torch.zeros(size)

    def begin(self) -> Floats:
        return np.ones_like(self._curvature)

    def gradient(self, weights: Floats) -> tuple[Floats, float]:
        noise = self._rng.integers(-64, 64, len(weights)).astype(np.float32) / np.float32(256)
        gradient = self._curvature * weights + noise
        self._count += 1
        return (gradient if self._codec is None else self._coded(gradient)), 0.0

    def score(self, weights: Floats) -> float:
        return 0.0

    def _coded(self, gradient: Floats) -> Floats:
        assert self._codec
        source, key = torch.from_numpy(gradient.copy()), CodecKey(7, self._count, 1, 0)
        if self._codec.feeds_back:
            source += self._residual
        body = torch.zeros(self._codec.bound(len(source), self._ratio), dtype=torch.uint8)
        size = self._codec.encode(source, body, key, self._ratio)
        if self._codec.feeds_back:
            self._residual = source
        out = torch.zeros(len(gradient))
        self._codec.decode(body[:size], out, key, self._ratio)
        return out.numpy()


class Decided(Trace):
    """Adds what was decided to a digest, without loss and gap, whose sums are a library's."""

    def __init__(self, digest: Digest) -> None:
        super().__init__()
        self._digest = digest

    def flush(self) -> None:
        for t, clock, worker, staleness, weight, _, _ in self.rows:
            self._digest.add(round(t, 6), clock, worker, staleness, round(weight, 12))
        super().flush()


TRAININGS = [
    ("sync", "nag", None),
    ("backup:1", "heavy-ball", "bf16"),
    ("bounded:2", "dana-dc", "fp16"),
    ("softsync:2", "nag", "int8"),
    ("async", "dana-zero", None),
    ("async", "dc-asgd", None),
    ("async", "plain", "randomk"),
    ("threshold:3", "gap-aware", "topk"),
    ("local:3", "outer-nesterov", None),
    ("local:3,quorum=2,grace=20", "outer-nesterov", "bf16"),
    ("local-async:3", "delayed-nesterov", None),
    ("async", "dana-slim", "int8"),
]


@pytest.mark.parametrize(("mode", "rule", "codec"), TRAININGS)
def test_a_simulated_training_is_the_recorded_one(mode: str, rule: str, codec: str | None) -> None:
    made, one = mode_of(mode), rules.named(rule)
    plain = rules.named("plain")
    inner = Inner(plain, {**plain.hyperparameters, "lr": 0.02}, made.inner_steps) if made.inner_steps else None
    given: Hyperparameters = {**one.hyperparameters, "lr": 0.02}
    work = SimulatedTraining(Bowl(codec, 0.1), one, lambda batches: given, inner=inner)
    speeds = WorkerSpeeds(spread=0.6, up=3, down=5, outages=(Outage(1, 900, 400), Outage(3, 9000)))
    digest = Digest()
    simulate(made, 5, speeds, 250, 3, work, Decided(digest))
    digest.add(hashlib.sha256(work.weights.tobytes()).digest())
    assert np.isfinite(work.weights).all()
    check(f"training {mode} {rule} {codec or ''}".strip(), digest)
