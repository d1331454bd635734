"""What becomes of a worker's processes when some have ended, and what each is told by its environment."""

from __future__ import annotations

import itertools

import pytest

from psjob import contract
from psjob.agent.decide import End, Ended, ProcessGroup, StartAgain, Wait, environment, verdict

KILLED, RETRY, REFUSED = 137, contract.EXIT_RETRY, contract.EXIT_REFUSED


def of(*ended: tuple[int, int], processes: int = 4, joined: bool = True, **more: bool) -> ProcessGroup:
    return ProcessGroup(processes, tuple(Ended(local, code) for local, code in ended), joined, **more)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (of(), Wait()),
        (of((1, 0)), Wait()),
        (of((1, 0), (0, 0), (3, 0), (2, 0)), End(0, patient=True)),
        (of((2, KILLED)), StartAgain(Ended(2, KILLED))),
        (of((0, 0), (2, 1)), StartAgain(Ended(2, 1))),
        (of((2, KILLED), spent=True), End(KILLED, patient=False)),
        (of((2, KILLED), joined=False), End(KILLED, patient=False)),
        (of((2, KILLED), stopping=True), End(KILLED, patient=True)),
        (of((1, RETRY)), End(RETRY, patient=True)),
        (of((1, REFUSED), spent=True), End(REFUSED, patient=True)),
        (of((1, RETRY), (0, KILLED)), StartAgain(Ended(0, KILLED))),
        (of(again=True), StartAgain(None)),
        (of((0, RETRY), again=True, spent=True, joined=False), StartAgain(None)),
        (of((0, RETRY), again=True, stopping=True), End(RETRY, patient=True)),
    ],
)
def test_what_is_to_be_done(now: ProcessGroup, then: object) -> None:
    assert verdict(now) == then


def test_a_worker_ends_well_only_where_each_process_does() -> None:
    for codes in itertools.product((0, 1, KILLED, RETRY), repeat=3):
        for joined, spent, stopping in itertools.product((False, True), repeat=3):
            decided = verdict(of(*enumerate(codes), processes=3, joined=joined, spent=spent, stopping=stopping))
            assert (decided == End(0, patient=True)) == (not any(codes))


def test_every_process_has_torchruns_names() -> None:
    given = {"PATH": "/bin", "RANK": "7", contract.ENV_INDEX: "1"}
    made = [environment(given, 1, 3, local, 2, 29500, [4, 5], 6) for local in range(2)]
    assert [env["RANK"] for env in made] == ["2", "3"] and [env["LOCAL_RANK"] for env in made] == ["0", "1"]
    for env in made:
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("6", "2", "1", "3")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["OMP_NUM_THREADS"], env["PATH"]) == ("127.0.0.1", "29500", "1", "/bin")
        assert (env[contract.ENV_SOCKETS], env[contract.ENV_REWINDS], env[contract.ENV_INDEX]) == ("4,5", "6", "1")
    assert environment({"OMP_NUM_THREADS": "3"}, 0, 1, 0, 2, 1, [1], 0)["OMP_NUM_THREADS"] == "3"
