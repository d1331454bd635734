"""Digests of workers' weights, compared: who is odd, which tensor is named, and what is said of the cause."""

from __future__ import annotations

from typing import Any

import pytest

from psjob.protocol.coordinator.consistency import BEGIN, MOMENTS, WHOLE, WINDOWS, Digest, Drift

NAMES = ("body.weight", "head.weight", "stem.weight", "codebook")


def digest(sums: str = "1234", clock: int = 16, kinds: str = "ttfb", **more: Any) -> Digest:
    """A sum is a letter or a digit."""
    return Digest(clock, more.pop("look", WHOLE), kinds, tuple(map(ord, sums)), more.pop("names", NAMES), **more)


RATES = {"alone": True, "numbers": ({"lr": 0.1, "weight_decay": 0.0},)}
TABLE: dict[str, tuple[list[Digest], str | None, str | None]] = {
    "all are equal": ([digest()] * 3, None, None),
    "by hand, the shards update": (
        [digest(), digest("x234"), digest()],
        "weights differ after step 16: parameter body.weight of worker 1 is not that of worker 0; the script of one of them has written "
        "weights by hand",
        None,
    ),
    "most are right": ([digest("x234"), digest(), digest()], "body.weight of worker 0 is not that of worker 1; ", None),
    "several tensors": ([digest(), digest("xy34")], "parameter body.weight and 1 more of worker 1 is not that of worker 0; ", None),
    "a rate": ([digest(**RATES), digest("x234", **{**RATES, "numbers": ({"lr": 0.05, "weight_decay": 0.0},)})],
        "learning rate is 0.05 on worker 1 and 0.1 on worker 0. Let all", None),
    "a rate, before the weights show it": ([digest(**RATES), digest(**{**RATES, "numbers": ({"lr": 0.1, "weight_decay": 0.5},)})],
        "workers come apart after step 16: weight_decay is 0.5 on worker 1 and 0 on worker 0", None),
    "a rate of the second group": ([digest(alone=True, numbers=({"lr": 1.0}, {"lr": 2.0})),
        digest(alone=True, numbers=({"lr": 1.0}, {"lr": 3.0}))], "learning rate of parameter group 1 is 3 on worker 1 and 2 on worker 0",
        None),
    "rates where the shards update": ([digest(numbers=({"lr": 1.0},)), digest(numbers=({"lr": 2.0},))],
        "workers ask the shards for different steps after step 16: learning rate is 2 on worker 1 and 1 on worker 0. Let all decide", None),
    "weights where the shards update, and rates": ([digest(numbers=({"lr": 1.0},)), digest("x234", numbers=({"lr": 2.0},))],
        "parameter body.weight of worker 1 is not that of worker 0; the script of one of them has written", None),
    "a loop without a batch": ([digest(**RATES), digest(**{**RATES, "numbers": ({"lr": 0.2},)}, left_out=3)],
        "The loop of worker 1 did not run for 3 steps, since it had no batch, and its scheduler was not stepped", None),
    "other processors": ([digest(alone=True, machine="A"), digest("x234", alone=True, machine="B")],
        "their processors may round otherwise (A, B); take updateAt: shard", None),
    "by hand, the workers update": ([digest(alone=True), digest("x234", alone=True)],
        "weights or optimizer state by hand, or its optimizer uses random numbers", None),
    "frozen, at the beginning": ([digest("3", 0, "f", look=BEGIN, names=("stem.weight",)), digest("x", 0, "f", look=BEGIN, names=())],
        "weights differ at the beginning: frozen parameter stem.weight of worker 1 is not that of worker 0; it was built otherwise: seed",
        None),
    "frozen, later": ([digest(), digest("12x4")], "frozen parameter stem.weight of worker 1 is not that of worker 0; the script writes",
        None),
    "not attached": ([digest(kinds="ttob", strangers=("Adam",)), digest("12x4", kinds="ttob", strangers=("Adam",))],
        "parameter stem.weight of worker 1 is not that of worker 0; an optimizer that was not attached steps it (Adam)", None),
    "buffers": ([digest(), digest("123x")], None, "buffers differ after step 16: buffer codebook of worker 1 and of worker 0."),
    "without names": ([digest(names=()), digest("x234", names=())], "parameter number 0 of worker 1", None),
    "other tensors": ([digest(), digest("12x", kinds="ttf", names=())], "frozen parameter stem.weight of worker 1 is", None),
    "another number of them": ([digest(), digest("1233", kinds="ttff")],
        "worker 1 has 2 frozen parameters after step 16 and worker 0 has 1; all must build", None),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_what_is_said(case: tuple[list[Digest], str | None, str | None]) -> None:
    digests, weights, buffers = case
    drift = Drift()
    said = [sentence for rank, one in enumerate(digests) for sentence in drift.came(rank, one, len(digests))]
    assert (drift.weights is None, drift.buffers is None) == (weights is None, buffers is None), (drift.weights, drift.buffers)
    assert (weights or "") in (drift.weights or "") and (buffers or "") in (drift.buffers or "")
    assert said == [sentence for sentence in (drift.weights, drift.buffers) if sentence is not None]
    assert drift.came(0, digests[0], 0) == [], "told twice"


def test_a_moment_is_judged_when_all_have_told_that_are_there() -> None:
    drift = Drift()
    assert drift.came(0, digest(), 3) == drift.came(1, digest("x234"), 3) == []
    assert drift.weights is None, "who is odd is not known yet"
    (said,) = drift.settled(2)
    assert "worker 1" in said

    late = Drift()
    for rank in (0, 1):
        assert late.came(rank, digest(), 2) == []
    assert late.came(2, digest("x234"), 2), "one that was not waited for is not passed over"

    passed = Drift()
    passed.came(0, digest(), 3)
    passed.came(1, digest("x234"), 3)
    said_later = [passed.came(0, digest(clock=16 * (2 + more)), 3) for more in range(MOMENTS)]
    assert [len(each) for each in said_later] == [0] * (MOMENTS - 1) + [1], "a worker that never tells hides nothing"


def test_other_moments_are_not_compared() -> None:
    drift = Drift()
    assert drift.came(0, digest(clock=16), 2) == drift.came(1, digest("x234", clock=32), 2) == []
    assert drift.came(1, digest("x234", look=WINDOWS), 2) == [], "other bytes, or another moment"
    drift.rewound()
    assert drift.came(1, digest("x234", clock=16), 2) == [], "what was told before a restore is of steps that are undone"
    assert drift.came(1, digest(clock=16), 2) == drift.came(0, digest(clock=16), 2) == [], "a worker that comes again tells anew"


BODY = {
    "look": WHOLE,
    "clock": 16,
    "kinds": "tf",
    "sums": [1, 2],
    "names": ["a", "b\n"],
    "numbers": [{"lr": 0.1, "odd": "x"}],
    "alone": True,
}


@pytest.mark.parametrize(
    "change",
    [{"look": "odd"}, {"look": []}, {"kinds": "tx"}, {"kinds": 5}, {"kinds": "t" * 5000}, {"sums": [1]}, {"sums": [1, 2.5]},
     {"names": ["a"]}, {"clock": -1}, {"clock": "1"},      {"numbers": [3]}, {"numbers": {}}],
)  # fmt: skip
def test_a_digest_out_of_shape_decides_nothing(change: dict[str, Any]) -> None:
    assert Digest.of({**BODY, "leftOut": 3}) == Digest(16, WHOLE, "tf", (1, 2), ("a", "b"), ({"lr": 0.1},), "", True, (), 3)
    assert Digest.of(BODY) == Digest(16, WHOLE, "tf", (1, 2), ("a", "b"), ({"lr": 0.1},), "", True)
    assert Digest.of({**BODY, **change}) is None
