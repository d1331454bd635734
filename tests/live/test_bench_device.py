"""The programs of `bench device` on the CPU, each once at a small size; and what the rows say of a machine without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from bench.envs import Missing
from bench.measures import MEASURES, ON_GPU, Against, Alone, Program
from bench.running import last_line
from tests.support.hardware import GPU
from tests.support.soaking import rotating

SMALL = ("--megabytes", "2", "--seconds", "0.05", "--shards", "2")
ROWS = [measure for measure in MEASURES if measure.name == "device"]
PROGRAMS = list(
    dict.fromkeys(
        program for row in ROWS for program in ([row.ours, *(peer for peer, _ in row.peers)] if isinstance(row, Against) else [row.program])
    )
)
WAYS = {"alone", "psjob", "overlap", "async", "ddp", "fsdp"}


def on_the_cpu(program: Program) -> Program:
    """The same program where its model lies on the CPU, and small."""
    words = [word for word in program.words if word not in ON_GPU] + list(SMALL)
    return dataclasses.replace(program, words=(*words, "--device", "cpu"), seconds=120.0)


def test_both_tables_have_all_their_rows() -> None:
    """The GPT's, and those of bare push and pull; and returns after a kill."""
    of = {file: {program.words for program in PROGRAMS if program.file == file} for file in {program.file for program in PROGRAMS}}
    assert {words[1] for words in of["device_gpt.py"]} == WAYS
    assert {words[words.index("--shards") + 1] for words in of["device_floor.py"]} == {"1", "2", "4", "8"}
    assert {ON_GPU[1] in words for words in of["gloo.py"]} == {True, False}
    assert {(words[words.index("--workers") + 1], words[words.index("--shards") + 1]) for words in of["psjob_ps.py"]} == {
        ("1", "1"),
        ("1", "4"),
        ("2", "4"),
    }
    assert {row.program.words[1].partition(":")[0] for row in ROWS if isinstance(row, Alone)} == {"worker", "shard", "process"}


QUICK = [("device_gpt.py", "psjob"), ("device_floor.py", "sgd")]
CASES = [
    (file, what)
    for file, whats in (("device_gpt.py", sorted(WAYS)), ("device_floor.py", ["adam", "sgd"]), ("gloo.py", ["allreduce"]))
    for what in whats
]


@pytest.mark.parametrize(("file", "what"), [case if case in QUICK else rotating(*case) for case in CASES])
def test_a_program_runs_on_the_cpu(file: str, what: str) -> None:
    program = next(each for each in PROGRAMS if each.file == file and (what in each.words or (what == "sgd" and "adam" not in each.words)))
    found = last_line(on_the_cpu(program))
    assert len(found["seconds"]) > 2 and min(found["seconds"]) > 0
    assert ("loss" in found) == (file == "device_gpt.py" and what != "async")


@pytest.mark.rotating
@pytest.mark.skipif(GPU, reason="this machine has a GPU, so no row is missing")
@pytest.mark.parametrize("file", sorted({program.file for program in PROGRAMS}))
def test_a_row_says_why_it_cannot_be_made_without_a_gpu(file: str) -> None:
    program = next(each for each in PROGRAMS if each.file == file and ON_GPU[1] in each.words)
    with pytest.raises(Missing, match="this machine has no GPU that torch can use"):
        last_line(program)
