"""Variables of a loop that nobody declared: which of them records hold, and how they are put back."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import gc
import random
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from psjob.api.values import MOST
from psjob.api.variables import Variables
from psjob.process.errors import Refused
from tests.tensors.variables import packed


def at_its_place(records: list[Any]) -> str:
    """What they hold of the script's place, and not of the passes before it. A value that has changed may have come back."""
    made = []
    for each in records:
        one = {name: value for name, value in each.items() if name not in ("ended", "plain", "first")}
        (function,) = {name for name in (*each["plain"], *each["first"]) if name.endswith(": train")}  # the test's own hold records
        one["made"] = each["made"].get(function, {})
        there = {**each["plain"].get(function, {}), **each["first"].get(function, {})}
        one["there"] = sorted((name, str(value)) for name, value in there.items())
        made.append(one)
    return str(made)


class Loader:
    """Stands where `ps.shard` does: it records as the script asks, or continues from a record after `finished` passes, at batch `at`."""

    def __init__(self, variables: Variables, kept: Any = None, finished: int = 0, at: int = 0) -> None:
        self.variables, self.kept, self.finished, self.at = variables, kept, finished, at
        self.records: list[Any] = []
        variables._kept.add(id(self))

    def __iter__(self) -> Iterator[int]:
        frame = sys._getframe(1)
        self.variables.begin_pass(frame)
        if self.finished:
            self.finished -= 1
            self.variables.lend(frame, self.kept, "here", 0)
            return
        for number in range(self.at, 3):
            self.variables.at(sys._getframe(1))
            if self.kept is not None:
                self.variables.load_state_dict(self.kept)
                self.kept = None
            self.records.append(packed(self.variables.state_dict()))
            self.variables.at(None)
            yield number
        self.variables.ended(sys._getframe(1), "here", 0)
        self.at = 0


class Stopper:
    """Counts."""

    def __init__(self) -> None:
        self.best, self.bad, self.seen = 0.0, 0, [0]
        self.inner = Inner()


class Inner:
    """Counts too."""

    def __init__(self) -> None:
        self.calls = 0


def train(loader: Loader, passes: int = 2) -> tuple[Any, ...]:
    fixed, best, losses, hidden, stopper, named = 7, 0.0, [], torch.zeros(3), Stopper(), {"a": (1, 2)}
    told = []
    for epoch in range(passes):
        total = 0
        for batch in loader:
            total += batch
            loss = torch.tensor(float(batch + epoch))
            losses.append(loss.item())
            hidden = hidden + 1
            stopper.bad += 1
            stopper.seen[0] += 2
            stopper.inner.calls += 1
        best = max(best, loss.item())
        named["b"] = (epoch, fixed)
        told.append((epoch, total, loss.item()))
    return best, losses, hidden.tolist(), stopper.bad, stopper.seen, stopper.inner.calls, named, told


@pytest.mark.parametrize("at", range(3))
def test_a_loop_that_begins_again_ends_as_one_that_does_not(at: int) -> None:
    """From each place in its second pass."""
    undisturbed = Loader(Variables([]))
    wanted = train(undisturbed)
    again = Loader(Variables([]), undisturbed.records[3 + at], finished=1, at=at)
    *results, told = train(again)
    assert results == list(wanted[:-1])
    assert told == wanted[-1]
    assert at_its_place(again.records) == at_its_place(undisturbed.records[3 + at :]), "and a restart of the restart finds the same"


def test_only_what_has_changed_is_held() -> None:
    loader = Loader(Variables([]))
    train(loader)
    (held,) = (values for name, values in loader.records[5]["plain"].items() if name.endswith("train"))
    assert "fixed" not in held and "passes" not in held
    assert {"best", "losses", "hidden", "epoch", "total", "loss", "stopper.bad", "stopper.seen", "stopper.inner.calls"} <= held.keys()
    assert loader.records[0]["plain"] == {}, "nothing had changed when the script first asked"


def test_a_value_that_was_what_it_is_at_first_is_put_back_too() -> None:
    def loop(loader: Loader) -> int:
        bad = 0
        for epoch in range(2):
            for _batch in loader:
                pass
            bad = 0 if epoch == 0 and not loader.kept else 5
        return bad

    undisturbed = Loader(Variables([]))
    loop(undisturbed)
    again = Loader(Variables([]), undisturbed.records[3], finished=1)
    seen: list[int] = []
    real = again.variables.load_state_dict

    def look(state: Any) -> None:
        real(state)
        seen.append(sys._getframe(2).f_locals["bad"])

    again.variables.load_state_dict = look  # type: ignore[method-assign]
    loop(again)
    assert seen == [0]


def test_a_second_model_that_changes_is_lost_and_said_so() -> None:
    model = torch.nn.Linear(2, 1)

    def loop(loader: Loader, average: torch.nn.Module, teacher: torch.nn.Module, shadow: dict[str, torch.Tensor]) -> None:
        for _batch in loader:
            with torch.no_grad():
                average.weight.add_(1.0)
                shadow["w"] = shadow["w"] + 1

    loader = Loader(Variables([model]))
    loop(loader, torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), {"w": torch.zeros(3)})
    assert loader.records[0]["lost"] == {}
    (lost,) = loader.records[1]["lost"].values()
    assert lost == {"average": "Linear", "shadow": "dict"}
    with pytest.raises(Refused, match=r"average \(Linear\), shadow \(dict\) had changed.*ps.state\(average=…\)"):
        Variables([]).load_state_dict(loader.records[1])


def test_the_best_weights_in_a_variable_are_lost_and_said_so() -> None:
    """It was None before the loop, and holds tensors now."""

    class Best:
        def __init__(self) -> None:
            self.weights: dict[str, torch.Tensor] | None = None

    def loop(loader: Loader, best: Best, weights: dict[str, torch.Tensor] | None = None) -> None:
        for _batch in loader:
            best.weights = weights = {"w": torch.zeros(9)}
        assert weights

    loader = Loader(Variables([]))
    loop(loader, Best())
    assert loader.records[0]["other"] == {}
    (lost,) = loader.records[1]["other"].values()
    assert {name: kind for name, (kind, _) in lost.items()} == {"weights": "dict", "best.weights": "dict"}
    with pytest.raises(Refused, match=r"weights \(dict\), best.weights \(dict\) had changed|best.weights \(dict\), weights"):
        loop(Loader(Variables([]), loader.records[1], at=1), Best())


def test_a_list_that_has_become_long_is_not_held_and_said_so() -> None:
    def loop(loader: Loader, losses: list[float]) -> None:
        for _batch in loader:
            losses.extend([0.5] * (MOST // 2 + 1))

    loader = Loader(Variables([]))
    loop(loader, [])
    assert [list(record["long"].values()) for record in loader.records] == [[], [], [{"losses": MOST + 2}]]


def test_the_attached_model_its_parts_and_what_attach_was_given_are_not_lost() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    average = torch.nn.Linear(2, 1)

    def loop(loader: Loader, layer: torch.nn.Module, whole: torch.nn.Module, average: torch.nn.Module) -> None:
        for _batch in loader:
            with torch.no_grad():
                layer.weight.add_(1.0)  # type: ignore[operator, union-attr]
                average.weight.add_(1.0)  # type: ignore[operator, union-attr]

    loader = Loader(Variables([model, average]))
    loop(loader, model[0], torch.nn.Sequential(model), average)
    assert all(record["lost"] == {} for record in loader.records)


def test_lists_of_the_models_parameters_are_not_lost() -> None:
    model = torch.nn.Linear(2, 1)

    def loop(loader: Loader, parameters: list[torch.Tensor], groups: list[dict[str, Any]]) -> None:
        for _batch in loader:
            with torch.no_grad():
                model.weight.add_(1.0)
        assert len(parameters) == 2 and groups

    loader = Loader(Variables([model]))
    loop(loader, list(model.parameters()), [{"params": list(model.parameters()), "lr": 0.1}])
    assert all(record["lost"] == {} for record in loader.records)
    assert all(record["other"] == {} for record in loader.records), "a record may be made before the weights of its step have come"


def test_a_list_of_other_parameters_of_the_model_is_another_one() -> None:
    model = torch.nn.Linear(2, 1)

    def loop(loader: Loader, parameters: list[torch.Tensor]) -> None:
        for _batch in loader:
            parameters[0] = model.bias
        assert parameters

    loader = Loader(Variables([model]))
    loop(loader, list(model.parameters()))
    (other,) = loader.records[1]["other"].values()
    assert loader.records[0]["other"] == {} and set(other) == {"parameters"}


WIDE = 100_000
"""Numbers of a tensor that no record holds."""


def moved(hidden: torch.Tensor, batch: int) -> torch.Tensor:
    return hidden * 0.5 + batch + 1


def carried(loader: Loader) -> torch.Tensor:
    hidden = torch.zeros(WIDE)
    for batch in loader:
        hidden = moved(hidden, batch)
    return hidden


def made_in_the_first_step(loader: Loader) -> torch.Tensor:
    first = True
    for batch in loader:
        if first:
            hidden, first = torch.zeros(WIDE), False
        hidden = moved(hidden, batch)
    return hidden


def none_at_first(loader: Loader) -> torch.Tensor:
    hidden = None
    for batch in loader:
        hidden = moved(torch.zeros(WIDE) if hidden is None else hidden, batch)
    assert hidden is not None
    return hidden


def in_an_object(loader: Loader) -> torch.Tensor:
    held = SimpleNamespace(hidden=torch.zeros(WIDE))
    for batch in loader:
        held.hidden = moved(held.hidden, batch)
    return held.hidden


def in_a_tuple(loader: Loader) -> torch.Tensor:
    hidden = (torch.zeros(WIDE), torch.ones(WIDE))
    for batch in loader:
        hidden = (moved(hidden[0], batch), moved(hidden[1], batch))
    return hidden[0] + hidden[1]


def in_an_array(loader: Loader) -> numpy.ndarray[Any, Any]:
    hidden = numpy.zeros(WIDE)
    for batch in loader:
        hidden = hidden * 0.5 + batch + 1
    return hidden


def written_in_an_array(loader: Loader) -> numpy.ndarray[Any, Any]:
    hidden = numpy.zeros(WIDE)
    for batch in loader:
        hidden += batch + 1
    return hidden


LOOPS = [carried, made_in_the_first_step, none_at_first, in_an_object, in_a_tuple, in_an_array, written_in_an_array]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_wide_hidden_state_that_each_step_makes_anew_is_refused(loop: Any) -> None:
    whole = Loader(Variables([]))
    loop(whole)
    with pytest.raises(Refused, match=r"hidden.*had changed since the script began to train"):
        loop(Loader(Variables([]), whole.records[2], at=2))


def test_a_hidden_state_that_is_first_made_in_a_step_is_put_back() -> None:
    def loop(loader: Loader) -> list[float]:
        first = True
        for batch in loader:
            if first:
                hidden, first = torch.zeros(8), False
            hidden = moved(hidden, batch)
        return hidden.tolist()

    whole = Loader(Variables([]))
    wanted = loop(whole)
    assert loop(Loader(Variables([]), whole.records[2], at=2)) == wanted
    (held,) = whole.records[2]["plain"].values()
    assert held["hidden"].tolist() == moved(moved(torch.zeros(8), 0), 1).tolist()


def test_what_each_step_makes_anew_and_no_other_reads_is_not_lost() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loader = loader

        def run(self, seen: int = 0) -> int:
            out, grads = None, [torch.zeros(WIDE)]
            for batch in self.loader:
                out = torch.full((WIDE,), float(batch))
                grads = [out * 2]
                wide = grads[0] + 1
                seen += int(wide[0])
            return seen

    loader = Loader(Variables([]))
    Trainer().run()
    assert not any(record[kind] for record in loader.records for kind in ("lost", "other", "long"))
    Trainer.__init__ = lambda self: setattr(self, "loader", Loader(Variables([]), loader.records[2], at=2))  # type: ignore[method-assign]
    assert Trainer().run() == 1 + 3 + 5


def test_a_wide_tensor_that_a_restarted_script_makes_again_is_no_hindrance(capsys: pytest.CaptureFixture[str]) -> None:
    def loop(loader: Loader, seed: int) -> float:
        total = 0.0
        for epoch in range(2):
            order = torch.randperm(WIDE, generator=torch.Generator().manual_seed(seed + epoch))
            for batch in loader:
                total += float(order[batch])
        return total

    whole = Loader(Variables([]))
    wanted = loop(whole, 3)
    assert [list(record["other"].values()) for record in whole.records[:3]] == [[], [], []]
    assert all(record["other"] for record in whole.records[3:])
    assert loop(Loader(Variables([]), whole.records[4], finished=1, at=1), 3) == wanted
    with pytest.raises(Refused, match=r"order \(Tensor\) had changed"):
        loop(Loader(Variables([]), whole.records[4], finished=1, at=1), 4)


class Annealed(torch.nn.Module):
    """Counts its calls, as for a weight that grows with them, and remembers its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, WIDE // 2))
        self.calls = 0
        self.output: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.output = self.inner(x)
        return self.output


class Mean(torch.nn.Module):
    """A metric, as of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = torch.zeros(3), 0

    def forward(self, x: int) -> list[float]:
        self.total += x
        self.count += 1
        return (self.total / self.count).tolist()


def test_numbers_in_models_and_metrics_are_put_back() -> None:
    def loop(loader: Loader) -> tuple[Any, ...]:
        model, metrics = torch.nn.Sequential(Annealed(), torch.nn.Linear(WIDE // 2, 1)), torch.nn.ModuleDict({"mean": Mean()})
        loader.variables._kept.add(id(model))
        seen = []
        for batch in loader:
            model(torch.ones(1, 2))
            seen.append((model[0].calls, metrics["mean"](batch)))
        return tuple(seen)

    whole = Loader(Variables([]))
    wanted = loop(whole)
    assert not any(record[kind] for record in whole.records for kind in ("lost", "other", "long"))
    assert loop(Loader(Variables([]), whole.records[2], at=2)) == wanted


def test_what_was_assigned_anew_leaves_its_first_value_to_other_names() -> None:
    def loop(loader: Loader) -> tuple[Any, ...]:
        first = hidden = torch.zeros(5)
        everything = recent = [0]
        shared = total = torch.zeros(2)
        for batch in loader:
            hidden = moved(hidden, batch)
            recent = [*recent, batch]
            total += batch
        return first.tolist(), hidden.tolist(), everything, recent, shared.tolist(), total.tolist()

    whole = Loader(Variables([]))
    wanted = loop(whole)
    assert loop(Loader(Variables([]), whole.records[2], at=2)) == wanted


class Phase(enum.Enum):
    A = 1
    B = 2


class Bare:
    """Its attributes cannot be asked for."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


class Odd:
    """Its class cannot be asked for."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of its context")

    @__class__.setter
    def __class__(self, _kind: Any) -> None: ...


class Empty(list):  # type: ignore[type-arg]
    """Nobody may go over it."""

    def __len__(self) -> int:
        raise RuntimeError("not now")


class Strict(torch.Tensor):
    """It knows no function of torch."""

    @classmethod
    def __torch_function__(cls, *_given: Any) -> Any:
        raise TypeError("no function is known")


def odd_values() -> dict[str, Any]:
    keyed = SimpleNamespace()
    keyed.__dict__[1] = 2  # type: ignore[index]
    graph = torch.ones(1, requires_grad=True).sum()
    return {
        "phase": Phase.A, "bare": Bare(), "keyed": keyed, "graphs": [graph], "named": {"loss": graph}, "huge": 10**5000,
        "complex": torch.tensor(1j, dtype=torch.complex128), "eight": torch.zeros(1, dtype=torch.float8_e4m3fn),
        "meta": torch.zeros((), device="meta"), "metas": [torch.zeros(1, device="meta")], "lazy": torch.nn.LazyLinear(2),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "sparse": torch.eye(3).to_sparse(),
        "counts": collections.defaultdict(float), "proxies": [weakref.proxy(torch.nn.Linear(1, 1))], "odd": [Odd()], "empty": Empty([1]),
        "strict": torch.ones(2).as_subclass(Strict), "proxy": weakref.proxy(torch.nn.Linear(1, 1)),
    }  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", odd_values())
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_odd_values_end_no_script(name: str, first: bool) -> None:
    def loop(loader: Loader) -> int:
        held = odd_values()[name] if first else None
        for batch in loader:
            if batch == 1:
                held = odd_values()[name]
        assert held is not None
        return loader.at

    whole = Loader(Variables([]))
    loop(whole)
    with contextlib.suppress(Refused):
        loop(Loader(Variables([]), whole.records[0]))


def test_an_enum_keeps_its_members() -> None:
    def loop(loader: Loader) -> list[Any]:
        phases = []
        for epoch in range(2):
            phase = Phase.B if epoch == 0 else Phase.A
            for _batch in loader:
                phases.append(phase.name)
        return phases

    whole = Loader(Variables([]))
    wanted = loop(whole)
    assert loop(Loader(Variables([]), whole.records[4], finished=1, at=1)) == wanted
    assert [(each.name, each.value) for each in Phase] == [("A", 1), ("B", 2)]


def test_models_that_a_loop_makes_anew_are_not_held() -> None:
    held: weakref.WeakSet[Annealed] = weakref.WeakSet()

    def loop(loader: Loader) -> None:
        for _batch in loader:
            fast = Annealed()
            held.add(fast)

    variables = Variables([])
    for _ in range(3):
        loop(Loader(variables))
    gc.collect()
    assert len(held) == 0


def test_the_best_weights_that_only_a_handler_reads_are_lost() -> None:
    def loop(loader: Loader) -> float:
        best = None
        try:
            for batch in loader:
                if batch == 1:
                    best = torch.ones(WIDE)
                if batch == 2:
                    raise StopAsyncIteration
        except StopAsyncIteration:
            pass
        assert best is not None
        return float(best.sum())

    whole = Loader(Variables([]))
    assert loop(whole) == WIDE
    with pytest.raises(Refused, match="best"):
        loop(Loader(Variables([]), whole.records[2], at=2))


def test_a_buffer_of_samples_is_lost_and_said_so() -> None:
    def loop(loader: Loader, held: list[tuple[torch.Tensor, float]], empty: list[tuple[torch.Tensor, float]]) -> None:
        for _batch in loader:
            held.append((torch.zeros(9), 0.5))
            empty.append((torch.zeros(9), 0.5))

    loader = Loader(Variables([]))
    loop(loader, [(torch.zeros(9), 0.5)] * (MOST + 1), [])
    (lost,) = loader.records[1]["lost"].values()
    assert lost == {"held": "list"}
    (other,) = loader.records[1]["other"].values()
    assert list(other) == ["empty"]


def test_samples_of_a_pass_are_lost_within_it_only() -> None:
    """They are taken together at its end, and the next one begins without any."""

    def loop(loader: Loader) -> list[float]:
        means = []
        samples: list[torch.Tensor] = []
        for _epoch in range(2):
            for batch in loader:
                samples.append(torch.full((9,), float(batch)))
            means.append(float(torch.cat(samples).mean()) if samples else -1.0)
            samples = []
        return means

    whole = Loader(Variables([]))
    wanted = loop(whole)
    assert [bool(record["other"]) for record in whole.records] == [False, True, True, False, True, True]
    assert loop(Loader(Variables([]), whole.records[3], finished=1)) == wanted
    with pytest.raises(Refused, match="samples"):
        loop(Loader(Variables([]), whole.records[4], finished=1, at=1))


class Averages:
    """As of a library: the averages of weights, in its state."""

    __module__ = "torch_ema"

    def __init__(self) -> None:
        self.shadow = [torch.zeros(9)]

    def update(self, value: float) -> None:
        self.shadow = [0.5 * self.shadow[0] + value]

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "shadow": [each.clone() for each in self.shadow]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_an_object_of_a_library_whose_state_has_tensors_is_refused_if_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_ema", torch)

    def loop(loader: Loader, averages: Averages, still: Averages) -> None:
        for batch in loader:
            averages.update(batch + 1)
        assert still

    whole = Loader(Variables([]))
    loop(whole, Averages(), Averages())
    loop(Loader(Variables([]), whole.records[0]), Averages(), Averages())
    with pytest.raises(Refused, match=r"averages \(Averages\) had changed"):
        loop(Loader(Variables([]), whole.records[1], at=1), Averages(), Averages())


class Schedules:
    """Holds a scheduler of a library."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        first, then = (torch.optim.lr_scheduler.ExponentialLR(optimizer, rate) for rate in (0.5, 0.9))
        self.both = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [2])


def test_schedulers_that_nobody_keeps_go_on_and_unchanged_ones_are_not_held() -> None:
    def loop(loader: Loader) -> tuple[Any, ...]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        step, still = (torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(2))
        schedules = Schedules(optimizer)
        optimizer.step()
        for _batch in loader:
            step.step()
            schedules.both.step()
        return step.state_dict(), schedules.both.state_dict(), still.state_dict()

    whole = Loader(Variables([]))
    wanted = loop(whole)
    assert not whole.records[0]["objects"]
    assert [set(objects) for objects in whole.records[1]["objects"].values()] == [{"step", "schedules.both"}]
    assert str(loop(Loader(Variables([]), whole.records[2], at=2))) == str(wanted)
    assert str(loop(Loader(Variables([]), whole.records[0], at=0))) == str(wanted), "nothing had changed then"


def test_a_loop_without_data_records_at_its_steps() -> None:
    loader = Loader(variables := Variables([]))

    def loop(kept: Any = None, at: int = 4) -> tuple[int, list[int]]:
        total, seen = 0, []
        for number in range(6):
            total += number if kept is None else 100  # made again, with other weights
            seen.append(total)
            variables.at_step(sys._getframe())
            if kept is not None and number == at:
                variables.load_state_dict(kept)
                kept = None
            loader.records.append(copy.deepcopy(variables.state_dict()))
            variables.at(None)
        return total, seen

    wanted = loop()
    kept = loader.records[4]
    loader = Loader(variables := Variables([]))
    assert loop(kept) == wanted
    assert variables.state_dict() == {}
    variables.load_state_dict({})


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "MT19937", "RandomState"])
def test_random_generators_that_nobody_keeps_go_on(kind: str) -> None:
    made: dict[str, Any] = {
        "torch": torch.Generator, "python": lambda: random.Random(3), "numpy": lambda: numpy.random.default_rng(1),
        "MT19937": lambda: numpy.random.Generator(numpy.random.MT19937(3)), "RandomState": lambda: numpy.random.RandomState(5),
    }  # fmt: skip

    def draw(generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return torch.randn(3, generator=generator).tolist()
        return generator.gauss(0, 1) if isinstance(generator, random.Random) else generator.normal(size=3).tolist()

    def loop(loader: Loader) -> list[Any]:
        generator = made[kind]()
        return [draw(generator) for _batch in loader]

    whole = Loader(Variables([]))
    wanted = loop(whole)
    assert loop(Loader(Variables([]), whole.records[1], at=1)) == wanted[1:]


def test_what_was_computed_keeps_its_graph_for_a_backward_that_is_to_come() -> None:
    """Of two steps in an iteration a restarted script stands at the first, with what the second is made of."""

    def loop(loader: Loader, weight: torch.Tensor) -> torch.Tensor:
        made = weight * 3
        for _part in loader:
            pass
        made.sum().backward()
        return made.detach()

    undisturbed = Loader(Variables([]))
    loop(undisturbed, torch.ones(2, requires_grad=True))
    state = undisturbed.records[1]
    (function,) = state["first"]
    state["plain"], state["assigned"] = {function: {"made": torch.full((2,), 5.0)}}, {function: ["made"]}
    weight = torch.zeros(2, requires_grad=True)
    assert loop(Loader(Variables([]), state, at=1), weight).tolist() == [5.0, 5.0]
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]
