"""Resume records: what goes in comes out in type and value, and nothing read can run."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psjob.api import advice, attachable
from psjob.api.recording import EXTRA, ExtraState
from psjob.process.errors import Refused
from psjob.resume import record, tagged
from psjob.resume.record import Generators, generator_states

keys = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
KINDS = [torch.float32, torch.device("cpu"), torch.Size([2, 3])]
ARRAYS = [numpy.float32(1.5), numpy.int64(-3), numpy.arange(6).reshape(2, 3)]
TENSORS = [torch.arange(3), torch.tensor(2.5), torch.zeros(0, 3), torch.ones(2, dtype=torch.bool), torch.eye(2, dtype=torch.complex64),
           torch.ones(3).to(torch.float8_e4m3fn)]  # fmt: skip
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=8) | st.binary(max_size=8)
leaves = plain | st.sampled_from(KINDS) | st.sampled_from(ARRAYS) | st.sampled_from(TENSORS)
hashable = st.integers() | st.text(max_size=3) | st.tuples(st.integers())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
        | st.dictionaries(hashable, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.sets(hashable, max_size=3)
        | st.frozensets(hashable, max_size=3)
    ),
    max_leaves=12,
)


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 2))


def captured(stateful: dict[str, Any] | None = None, cursor: dict[str, int] | None = None) -> record.ResumeRecord:
    m = model()
    return record.capture(cursor or {"epoch": 2, "round": 7}, 41, m, stateful or {}, torch.optim.SGD(m.parameters(), lr=0.1))


@given(values)
@settings(max_examples=50)
def test_values_come_back_as_they_were(value: Any) -> None:
    kept = record.ResumeRecord(None, 0, {}, {"x": value}, [])
    again = record.unpack(record.pack(kept)).stateful["x"]
    assert tagged.differences(value, again) == []
    assert record.verify_round_trip({"x": Holder(value)}) == []


SCHEDULERS: list[Any] = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=40),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3, cycle_momentum=False),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], milestones=[4]
    ),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(make: Any) -> None:
    rates: list[list[float]] = []
    for cut in (None, 6):
        m = model()
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        assert record.verify_round_trip({"scheduler": scheduler}) == []
        seen: list[float] = []
        for step in range(12):
            if step == cut:
                blob = record.pack(record.capture({}, step, m, {"scheduler": scheduler}, optimizer))
                m = model()
                optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
                scheduler = make(optimizer)
                record.restore(record.unpack(blob), m, {"scheduler": scheduler}, optimizer)
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def test_generators_buffers_cursor_and_numbers_come_back() -> None:
    m = model()
    optimizer = torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), betas=(0.8, 0.9))
    m(torch.randn(4, 6))
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=8.0)
    blob = record.pack(record.capture({"epoch": 1, "round": 2}, 9, m, {"scaler": scaler}, optimizer))
    drawn = (torch.rand(5).tolist(), random.random(), numpy.random.rand(), random.gauss(0, 1), numpy.random.randn())
    buffers = {name: b.clone() for name, b in m.named_buffers()}
    m(torch.randn(4, 6))
    optimizer.param_groups[0]["lr"].fill_(7)
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    again = record.unpack(blob)
    assert again.cursor == {"epoch": 1, "round": 2} and again.step == 9
    record.restore(again, m, {"scaler": scaler}, optimizer)
    assert (torch.rand(5).tolist(), random.random(), numpy.random.rand(), random.gauss(0, 1), numpy.random.randn()) == drawn
    assert all(torch.equal(b, buffers[name]) for name, b in m.named_buffers())
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_records_packed_one_after_another_are_those_packed_alone() -> None:
    m = model()
    optimizer, packer, states = torch.optim.SGD(m.parameters(), lr=0.1), record.RecordPacker(), Generators()
    draws = [lambda: 0, lambda: 0, random.random, lambda: torch.rand(3), numpy.random.rand, lambda: m(torch.rand(4, 6)), lambda: 0]
    for step, draw in enumerate(draws):
        draw()
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        held = {"x": Holder([torch.arange(step % 3), step])}
        blob = packer.pack(record.capture({"round": step}, step, m, held, optimizer, rng=states.states()))
        assert blob == record.pack(record.capture({"round": step}, step, m, held, optimizer))
        kept = record.unpack(blob)
        assert (kept.step, kept.stateful["x"][1]) == (step, step) and tagged.differences(kept.rng, generator_states()) == []


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1), numpy.random.rand])
def test_states_of_generators_are_new_only_where_one_has_drawn(draw: Callable[[], object]) -> None:
    states = Generators()
    first = states.states()
    assert states.states() is first
    draw()
    assert states.states() is not first and tagged.differences(states.states(), generator_states()) == []


def test_a_record_without_cursor() -> None:
    m = model()
    assert record.unpack(record.pack(record.capture(None, 0, m, {}, torch.optim.SGD(m.parameters(), lr=0.1)))).cursor is None


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"fn": len}, "x.fn: a builtins.builtin_function_or_method cannot be kept"),
        ({"a": [1, Point(1, 2)]}, r"x\.a\[1\]: a .*Point cannot be kept"),
        ({"m": torch.nn.Linear(1, 1)}, "Linear cannot be kept"),
        ({"s": torch.eye(2).to_sparse()}, "sparse"),
        ({"o": numpy.array([object()])}, "numpy.ndarray cannot be kept"),
    ],
)
def test_what_would_not_come_back_is_named(state: Any, words: str) -> None:
    import re

    (problem,) = record.verify_round_trip({"x": Holder(state)})
    assert re.search(words, problem)
    with pytest.raises(Refused, match=words):
        record.pack(captured({"x": Holder(state)}))


def test_what_holds_itself_is_named() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    (problem,) = record.verify_round_trip({"x": Holder(loop)})
    assert "nested deeper" in problem


def test_differences_are_sentences() -> None:
    assert tagged.differences(Counter({1: 2}), {"1": 2}, "scheduler.milestones") == ["scheduler.milestones: Counter came back as dict"]
    assert tagged.differences({"a": (1, 2)}, {"a": (1, 3)}, "x") == ["x.a[1]: '2' came back as '3'"]
    assert tagged.differences(float("nan"), float("nan")) == []
    assert tagged.differences(0.0, -0.0) != []
    assert tagged.differences({1: 0}, {True: 0}, "x") == ["x: its keys came back as others"]
    nan = float("nan")
    assert tagged.differences({nan: complex(0, nan)}, {-nan: complex(0, nan)}) == []


def test_another_model_or_other_things_are_refused_by_name() -> None:
    blob = record.pack(captured({"a": Holder(1)}))
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with pytest.raises(Refused, match="'b' only now"):
        record.restore(record.unpack(blob), m, {"a": Holder(1), "b": Holder(2)}, optimizer)
    other = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(6))
    with pytest.raises(Refused, match=r"buffer '1.running_mean' is \(6,\)"):
        record.restore_buffers(record.unpack(blob), other)
    with pytest.raises(Refused, match="is only in the job"):
        record.restore_buffers(record.unpack(blob), torch.nn.Linear(1, 1))
    with pytest.raises(Refused, match="1 parameter groups, the resume record 2"):
        two = torch.optim.SGD([{"params": [p]} for p in torch.nn.Linear(2, 2).parameters()], lr=0.1)
        half = record.unpack(record.pack(record.capture(None, 0, m, {}, two)))
        record.restore(half, m, {}, optimizer)


class Bank(torch.nn.Module):
    """Its buffers change their form as it trains: one grows, one comes with the first batch, one goes, one is added."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, 1)
        self.register_buffer("table", torch.zeros(0, width), persistent=False)
        self.register_buffer("mean", None)
        self.register_buffer("first", torch.ones(width))
        self.register_buffer("calls", torch.zeros(()))

    def train_once(self) -> None:
        self.table = torch.cat([self.table, torch.full((1, 2), float(self.calls))])
        self.calls += 1
        self.mean = torch.full((3,), float(self.calls))
        self.first = None
        if not hasattr(self.inner, "late"):
            self.inner.register_buffer("late", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.inner.late += 2


def kept_of(bank: Bank, built: record.BuiltBuffers) -> record.ResumeRecord:
    sgd = torch.optim.SGD(bank.parameters(), lr=0.1)
    return record.unpack(record.pack(record.capture(None, 3, bank, {}, sgd, built=built)))


@pytest.mark.parametrize("again", [0, 1, 3])
def test_buffers_come_back_in_the_form_that_they_had(again: int) -> None:
    """Whatever the started script has made of them `again` by then."""
    bank = Bank()
    built = record.BuiltBuffers(bank)
    for _ in range(2):
        bank.train_once()
    kept = kept_of(bank, built)
    wanted = {name: buffer.clone() for name, buffer in bank.named_buffers()}
    other = Bank()
    forms = record.BuiltBuffers(other).forms
    for _ in range(again):
        other.train_once()
    record.restore_buffers(kept, other, built=forms)
    found = dict(other.named_buffers())
    assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
    assert other.state_dict().keys() == bank.state_dict().keys(), "and what state_dict leaves out is left out"
    assert kept.unsaved == ["inner.late", "table"]
    other.train_once()
    bank.train_once()
    assert all(buffer.equal(dict(bank.named_buffers())[name]) for name, buffer in other.named_buffers())


def test_a_model_that_was_built_in_another_form_is_refused() -> None:
    bank = Bank()
    built = record.BuiltBuffers(bank)
    bank.train_once()
    kept = kept_of(bank, built)
    other = Bank(3)
    with pytest.raises(Refused, match=r"buffer 'first' is \(3,\) torch.float32, the job's is \(2,\)"):
        record.restore_buffers(kept, other, built=record.BuiltBuffers(other).forms)
    first = kept_of(Bank(), record.BuiltBuffers(Bank()))
    grown = Bank()
    grown.train_once()
    with pytest.raises(Refused, match="buffer 'first' is only in the job"):
        record.restore_buffers(first, grown)


def test_a_buffer_that_nobody_may_write_into_comes_back() -> None:
    model = torch.nn.Linear(1, 1)
    model.register_buffer("expanded", torch.ones(1).expand(4))
    with torch.inference_mode():
        model.register_buffer("inferred", torch.arange(3.0))
    before = model.expanded
    record.put_buffers(model, {"expanded": torch.ones(4), "inferred": torch.arange(3.0)})
    assert model.expanded is before, "equal values stay where they are"
    record.put_buffers(model, {"expanded": torch.arange(4.0), "inferred": torch.ones(3)})
    assert model.expanded.tolist() == [0.0, 1.0, 2.0, 3.0] and model.inferred.tolist() == [1.0] * 3
    assert before.tolist() == [1.0] * 4


def test_names_that_share_a_buffer_go_on_sharing_it() -> None:
    def made() -> torch.nn.ModuleDict:
        parts = {name: torch.nn.Linear(1, 1) for name in ("a", "b", "c")}
        table = torch.zeros(2)
        for name, part in parts.items():
            part.register_buffer("table", torch.zeros(2) if name == "c" else table)
        return torch.nn.ModuleDict(parts)

    first = made()
    built = record.BuiltBuffers(first)
    first["a"].table = first["b"].table = first["c"].table = torch.ones(4)
    sgd = torch.optim.SGD(first.parameters(), lr=0.1)
    kept = record.unpack(record.pack(record.capture(None, 3, first, {}, sgd, built=built)))
    other = made()
    record.restore_buffers(kept, other, built=record.BuiltBuffers(other).forms)
    assert all(part.table.tolist() == [1.0] * 4 for part in other.values())
    assert other["a"].table is other["b"].table


def test_a_scripted_model_has_its_buffers_back() -> None:
    def made() -> torch.nn.Module:
        return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))

    first = made()
    built = record.BuiltBuffers(first)
    first(torch.randn(4, 2))
    sgd = torch.optim.SGD(first.parameters(), lr=0.1)
    kept = record.unpack(record.pack(record.capture(None, 3, first, {}, sgd, built=built)))
    other = made()
    record.restore_buffers(kept, other, built=record.BuiltBuffers(other).forms)
    assert all(buffer.equal(dict(first.named_buffers())[name]) for name, buffer in other.named_buffers())
    assert ExtraState.of(other) == {}


class Warming(torch.nn.Linear):
    """Keeps a number as torch's modules may keep what is no tensor."""

    calls: Any = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_of_modules_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(Warming(1, 1), torch.nn.Linear(1, 1), Warming(1, 1))
    (name, thing), *_ = ExtraState.of(model).items()
    model[0].calls, model[2].calls = 7, 8
    kept = copy.deepcopy(thing.state_dict())
    model[0].calls = model[2].calls = 0
    thing.load_state_dict(kept)
    assert (model[0].calls, model[2].calls) == (7, 8) and name == EXTRA
    thing.load_state_dict({})
    assert model[0].calls == 7, "a record of an earlier version has none"
    assert ExtraState.of(torch.nn.Linear(1, 1)) == {}
    told: list[str] = []
    monkeypatch.setattr(advice, "tell_once", lambda _kind, sentence: told.append(sentence))
    model[2].calls = object()
    assert list(ExtraState.of(model)[EXTRA].state_dict()) == ["0"]
    assert "2.get_extra_state().calls: a builtins.object cannot be kept" in told[0]


@pytest.mark.parametrize(("given", "told"), [("all", 0), ("trained", 1), ("tied", 0)])
def test_frozen_parameters_that_the_optimizer_does_not_have_are_told(monkeypatch: pytest.MonkeyPatch, given: str, told: int) -> None:
    sentences: list[str] = []
    monkeypatch.setattr(advice, "tell_once", lambda _kind, sentence: sentences.append(sentence))
    trained, frozen = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Sequential(trained, frozen)
    if given == "tied":
        frozen.weight = trained.weight
    else:
        frozen.requires_grad_(False)
    parameters = model.parameters() if given == "all" else trained.parameters()
    _, table = attachable.table_of(model, torch.optim.SGD(parameters, lr=0.1))
    attachable.tell_frozen(model, table)
    assert len(sentences) == told and all("in no group of the optimizer: 1.weight. Each" in one for one in sentences)


BLOB = record.pack(captured({"s": Holder({1: (2, numpy.arange(3)), "c": Counter("ab")})}))


@given(st.integers(0, len(BLOB) - 1), st.integers(1, 255))
@example(BLOB.index(b"<i8"), ord("<") ^ ord(","))
@settings(max_examples=60)
def test_a_flipped_byte_does_no_worse_than_value_error(position: int, change: int) -> None:
    broken = bytearray(BLOB)
    broken[position] ^= change
    try:
        record.unpack(bytes(broken))
    except ValueError:
        pass


@pytest.mark.parametrize(
    "blob", [b"", b"PSJR", BLOB[:-1], BLOB[:40], b"PSJR" + b"\xff" * 40, b"\x80\x04" + BLOB, BLOB.replace(b"PSJR\x01", b"PSJR\x02")]
)
def test_a_broken_record_is_a_sentence(blob: bytes) -> None:
    with pytest.raises(ValueError, match="resume record"):
        record.unpack(blob)


def packed(**parts: Any) -> bytes:
    plain: dict[str, Any] = {"cursor": None, "step": 3, "buffers": {}, "stateful": {}, "groups": []}
    return record.pack(record.ResumeRecord(**(plain | parts)))


COLLIDE = [number * (2**61 - 1) for number in range(2000)]
"""Their hash is 0: a set of n of them takes time as n squared."""


@pytest.mark.parametrize(
    "value",
    [
        *(kind(COLLIDE) for kind in (set, frozenset, dict.fromkeys, Counter, OrderedDict.fromkeys)),
        defaultdict(int, dict.fromkeys(COLLIDE, 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_that_collide_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="2000 keys with one hash"):
        record.unpack(packed(stateful={"x": value}))
    assert record.buffers_of(packed(stateful={"x": value}, buffers={"mean": torch.ones(2)}))["mean"].equal(torch.ones(2))


def test_buffers_are_read_without_the_rest() -> None:
    blob = packed(buffers={"mean": torch.arange(3.0), "own": torch.ones(1)}, unsaved=["own"], stateful={"x": {"a": torch.ones(2)}})
    found = record.buffers_of(blob)
    assert list(found) == ["mean"] and found["mean"].equal(torch.arange(3.0))
    for damaged in (blob[:40], blob[:16] + b"[]" + blob[18:], packed(buffers={"mean": 3})):  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="resume record"):
            record.buffers_of(damaged)


@pytest.mark.parametrize("place", [-1, 625, 2**31, True])
def test_a_place_beyond_numpys_state_is_refused(place: int) -> None:
    state = numpy.random.RandomState(3).get_state(legacy=False)
    assert isinstance(state, dict)
    assert record.unpack(packed(rng={"numpy": state})).rng["numpy"]["state"]["pos"] == 624
    state["state"]["pos"] = place
    with pytest.raises(ValueError, match="expected 0 to 624"):
        record.unpack(packed(rng={"numpy": state}))
