"""Variables of a loop that nobody declared: which of them records hold, and how they are put back."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from psjob.api.variables import MOST, Variables
from psjob.process.errors import Refused


class Loader:
    """Stands where `ps.shard` does: it records as the script asks, or goes on from a record after `finished` passes, at its batch `at`."""

    def __init__(self, variables: Variables, kept: Any = None, finished: int = 0, at: int = 0) -> None:
        self.variables, self.kept, self.finished, self.at = variables, kept, finished, at
        self.records: list[Any] = []
        variables._kept.add(id(self))

    def __iter__(self) -> Iterator[int]:
        frame = sys._getframe(1)
        self.variables.begin_pass(frame)
        if self.finished:
            self.finished -= 1
            self.variables.lend(frame, self.kept)
            return
        for number in range(self.at, 3):
            self.variables.at(sys._getframe(1))
            if self.kept is not None:
                self.variables.load_state_dict(self.kept)
                self.kept = None
            self.records.append(copy.deepcopy(self.variables.state_dict()))
            self.variables.at(None)
            yield number
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
    assert str(again.records) == str(undisturbed.records[3 + at :]), "and a restart of the restart finds the same"


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
    assert loader.records[0]["lost"] == {}
    (lost,) = loader.records[1]["lost"].values()
    assert lost == {"weights": "dict", "best.weights": "dict"}


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


def test_a_buffer_of_samples_is_lost_and_said_so() -> None:
    def loop(loader: Loader, held: list[tuple[torch.Tensor, float]], empty: list[tuple[torch.Tensor, float]]) -> None:
        for _batch in loader:
            held.append((torch.zeros(9), 0.5))
            empty.append((torch.zeros(9), 0.5))

    loader = Loader(Variables([]))
    loop(loader, [(torch.zeros(9), 0.5)] * (MOST + 1), [])
    (lost,) = loader.records[1]["lost"].values()
    assert lost == {"held": "list", "empty": "list"}


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
