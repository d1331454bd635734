"""Objects of libraries that change as a script trains: what records hold of them, and how it is put back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy
import packaging
import pytest
import torch

from psjob.api import advice, objects
from psjob.api.variables import Variables
from psjob.process.errors import Refused
from tests.tensors.variables import packed


def of_library(kind: type) -> type:
    """The class as an installed package would have it."""
    kind.__module__ = packaging.__name__
    return kind


SAID: list[str] = []
"""No variable of a function under way, which would be put back."""


@of_library
class Counts:
    def __init__(self) -> None:
        self.iteration = self.epoch = 0
        self.best: list[float] = []
        self.text = "of this process"
        self.batch = torch.zeros(3)


@of_library
class Engine:
    """As ignite's: its `load_state_dict` works the epoch out, for epochs of a length that these do not have."""

    def __init__(self, length: int = 100) -> None:
        self.counts = Counts()
        self.length = length

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.counts.iteration, "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts.iteration, self.length = state["iteration"], state["length"]
        self.counts.epoch = self.counts.iteration // self.length

    def run(self, handler: Any, epochs: int) -> None:
        while self.counts.epoch < epochs:
            self.counts.epoch += 1
            self.counts.iteration += 3
            handler()


class Steps:
    """Stands where a step does: it records at each of the script's steps, or puts a record back at step `at`."""

    def __init__(self, kept: Any = None, at: int = 0, weight: float = 1.0) -> None:
        self.variables, self.kept, self.at, self.made, self.weight = Variables([]), kept, at, 0, weight
        self.records: list[Any] = []
        self.variables._kept.add(id(self))

    def __call__(self) -> None:
        self.variables.at_step(sys._getframe(1))
        self.made += 1
        if self.kept is not None and self.made == self.at:
            self.variables.load_state_dict(self.kept)
            self.kept = None
        self.records.append(packed(self.variables.state_dict()))
        self.variables.at(None)


def test_what_a_state_dict_leaves_out_is_put_back_after_it() -> None:
    """By all paths that lead to the engine: a handler has it too."""

    def loop(step: Steps, epochs: int) -> tuple[int, list[float], str, int]:
        engine = Engine()
        engine.counts.text = f"of start {step.weight}"

        def handler() -> None:
            engine.counts.best.append(step.weight + engine.counts.epoch)
            step()

        engine.run(handler, epochs)
        return engine.counts.epoch, engine.counts.best, engine.counts.text, step.made

    undisturbed = Steps()
    epoch, best, _, made = loop(undisturbed, 6)
    assert (epoch, made) == (6, 6)
    again = Steps(undisturbed.records[3], at=4, weight=9.0)
    assert loop(again, 6) == (6, [*best[:4], 14.0, 15.0], "of start 9.0", 6), "a text may be of this process"


def test_an_engine_that_attach_was_given_is_counted_on_too() -> None:
    """Its own state is put back by its name in the record, before variables are."""

    def loop(step: Steps, state: dict[str, Any] | None = None) -> int:
        engine = Engine()
        step.variables._kept.add(id(engine))

        def handler() -> None:
            if state is not None and step.made + 1 == step.at:
                engine.load_state_dict(state)
            step()

        engine.run(handler, 5)
        return step.made

    undisturbed = Steps()
    assert loop(undisturbed) == 5
    assert loop(Steps(undisturbed.records[2], at=3), {"iteration": 9, "length": 100}) == 5


def test_a_list_of_a_library_that_holds_objects_by_now_is_its_own_matter() -> None:
    """As the references to loaders that Accelerate's state has."""

    def loop(step: Steps) -> int:
        engine = Engine()
        for _ in range(2):
            step()
            engine.counts.best.append(object())  # type: ignore[arg-type]
        return engine.counts.epoch

    undisturbed = Steps()
    loop(undisturbed)
    assert undisturbed.records[1]["lost"] == {}
    loop(Steps(undisturbed.records[1], at=2))


@of_library
class Game:
    """A state that is played on, by draws of its own."""

    def __init__(self) -> None:
        self.draws = numpy.random.default_rng(3)
        self.place = numpy.zeros(4)
        self.moves = 0

    def play(self, move: float) -> float:
        self.moves += 1
        self.place = self.place + move * self.draws.random(4)
        return float(self.place.sum())


@of_library
class Wrapper:
    def __init__(self, game: Any) -> None:
        self.game = game


@of_library
class Agent:
    def __init__(self, size: int) -> None:
        self.games = [Wrapper(Wrapper(Game()))]
        self.rollout = numpy.zeros((size, 2), dtype=numpy.float32)

    def learn(self, step: Any) -> list[float]:
        seen = []
        for at in range(6):
            self.rollout[at] = self.games[0].game.game.play(step.weight)
            seen.append(float(self.rollout[:6].sum()))
            step()
        return [*seen, float(self.rollout.sum())]


def learned(step: Steps, size: int = 8) -> float:
    agent = Agent(size)
    return agent.learn(step)[-1]


def test_a_game_goes_on_where_it_was_though_other_weights_have_played_it() -> None:
    undisturbed = Steps()
    wanted = learned(undisturbed)

    class Resumed(Steps):
        """Its weights are those of the record from there on."""

        def __call__(self) -> None:
            super().__call__()
            self.weight = 1.0 if self.kept is None else self.weight

    assert learned(Steps(weight=5.0)) != wanted
    assert learned(Resumed(undisturbed.records[2], at=3, weight=5.0)) == wanted, "the first moves of the restarted script were others"


def test_a_rollout_too_large_for_a_record_is_refused_where_it_is_another() -> None:
    undisturbed = Steps()
    learned(undisturbed, size=4000)
    learned(Steps(undisturbed.records[2], at=3), size=4000)  # the same moves make the same
    with pytest.raises(Refused, match=r"agent\.rollout \(ndarray\) had changed since the script began to train.*ps\.state\(rollout=…\)"):
        learned(Steps(undisturbed.records[2], at=3, weight=5.0), size=4000)


def test_beside_a_known_place_only_what_has_a_state_is_looked_into() -> None:
    def seen(variables: Variables, by_steps: bool) -> set[str]:
        engine, agent = Engine(), Agent(4)
        frame = sys._getframe()
        (variables.at_step if by_steps else variables.begin_pass)(frame)
        variables.at(frame)
        engine.counts.epoch, agent.games[0].game.game.moves, agent.rollout[0] = 5, 7, 1.0
        (held,) = (names for function, names in variables.state_dict()["plain"].items() if function.endswith(".seen"))
        return {name for name in held if "." in name}

    assert seen(Variables([]), by_steps=False) == {"engine.counts.epoch"}
    everything = {"engine.counts.epoch", "agent.games.0.game.game.moves", "agent.rollout"}
    assert seen(Variables([]), by_steps=True) == everything


def test_an_object_that_counts_otherwise_than_it_was_told_is_refused() -> None:
    @of_library
    class Meter:
        __slots__ = ("_hidden",)

        def __init__(self) -> None:
            self._hidden = iter([1, 2])

        def state_dict(self) -> dict[str, Any]:
            return {"count": 4 if isinstance(self._hidden, list) else 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """It forgets."""

    def loop(step: Steps, counts: bool) -> None:
        meter: Any = Meter()
        for _ in range(2):
            if counts:
                meter._hidden = [numpy.zeros(0, dtype=object)]
            step()
        assert meter

    undisturbed = Steps()
    loop(undisturbed, counts=False)
    loop(undisturbed, counts=True)
    with pytest.raises(Refused, match=r"meter \(Meter\) was given count = 4 by its load_state_dict, and its state_dict says 3"):
        loop(Steps(undisturbed.records[3], at=2), counts=False)


@pytest.mark.parametrize(
    "thing", [torch.nn.Linear(1, 1), 3, "text", Path("."), sys, len, Counts, torch.zeros(2), numpy.zeros(2), [], ValueError()]
)
def test_what_is_not_looked_into(thing: Any) -> None:
    assert not objects.is_entered(thing)


def test_parts_of_what_refers_to_itself_end() -> None:
    one = Wrapper(None)
    one.game = {"back": one, "numbers": [1, 2], "name": "text"}
    assert list(objects.library_parts(one, "one", 9, objects.Met(), ())) == [("one.game.numbers", [1, 2])]


def test_a_game_whose_state_is_not_seen_is_told_of_where_it_was_played_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "tell_once", lambda _kind, sentence: SAID.append(sentence))

    @of_library
    class Simulator:
        __slots__ = ()

    def loop(step: Steps) -> None:
        agent: Any = Wrapper(Wrapper(Simulator()))
        agent.game.moves = 0
        for _ in range(3):
            agent.game.moves += int(step.weight)
            step()
        assert agent

    undisturbed = Steps()
    loop(undisturbed)
    loop(Steps(undisturbed.records[1], at=2))
    assert not SAID
    loop(Steps(undisturbed.records[1], at=2, weight=5.0))
    (sentence,) = SAID
    assert "another agent.game.moves than the lost one" in sentence and "agent.game.game (Simulator)" in sentence


def test_what_runs_tests_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fixture is to undo after a test was put back to what a record held, and never undone."""
    assert not objects.is_entered(monkeypatch)
