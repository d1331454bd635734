"""Every field that a shard reads of a worker is in `psjob.shard.worker_fields`, in one class.

Fields are taken from the code that reads them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import psjob
from psjob.layout.blocks import TensorSpec
from psjob.shard import session
from psjob.shard.worker_fields import ANY, FIELDS, NAMES, Belief, known
from psjob.tables import TableSpec
from psjob.wire.frame import Header, Kind

ROOT = Path(psjob.__file__).parent
COORDINATOR = ROOT / "protocol/coordinator"
READERS = (*sorted((ROOT / "shard").glob("*.py")), COORDINATOR / "events.py", COORDINATOR / "consistency.py", ROOT / "modes/stages.py")
BODIES = frozenset({"hello", "body", "told", "raw", "said"})
"""Names that a body of a frame has in these files."""
NOT_A_WORKERS = {
    "coordinator_disk.py": {"read_part"},
    "push_metrics.py": {"heard", "read"},
    "keeper.py": {"_hear"},
    "state_memory.py": {"found"},
    "server.py": {"take_up"},
    "store.py": {"take_up"},
    "status_server.py": {"status", "last_words"},
    "coordinator_driver.py": {"answer", "_late", "status", "take_up", "__init__", "run"},
    "events.py": {"of_peer"},
}
"""Functions that read what another shard, the coordinator or this process itself wrote."""


def reads(source: str) -> Iterator[tuple[str, str]]:
    """(function, key) of each constant key that is taken from a body."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            held, key = None, None
            if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                held, key = node.args[0], node.args[1]  # such as _number(body, "step")
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                held, key = node.value, node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
                held, key = node.func.value, node.args[0]
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
                held, key = node.comparators[0], node.left
            name = held.id if isinstance(held, ast.Name) else held.attr if isinstance(held, ast.Attribute) else None
            if name in BODIES and isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield function.name, key.value
            elif name in BODIES and isinstance(key, ast.Name):
                yield from ((function.name, word) for word in _named(function, key.id))


def _named(function: ast.FunctionDef, variable: str) -> Iterator[str]:
    """The words that a loop or comprehension over constants gives to a variable."""
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name) and node.target.id == variable:
            yield from (each.value for each in ast.walk(node.iter) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def read_of_workers() -> dict[str, set[str]]:
    """By key, where it is read."""
    found: dict[str, set[str]] = {}
    for file in READERS:
        for function, key in reads(file.read_text()):
            if function not in NOT_A_WORKERS.get(file.name, ()):
                found.setdefault(key, set()).add(f"{file.name}:{function}")
    return found


def test_every_key_that_a_shard_reads_is_in_a_class() -> None:
    listed = {field.name.rpartition(".")[2] for field in FIELDS}
    # Of its own: a shard's hello says these.
    found = {key: where for key, where in read_of_workers().items() if not where <= {"acceptor.py:_check"}}
    assert len(found) > 60
    assert {key: where for key, where in found.items() if key not in listed} == {}


def test_a_new_key_would_be_seen() -> None:
    source = 'def heard(body):\n    return body.get("root"), body["shell"], "pipe" in body\n'
    assert sorted(key for _, key in reads(source)) == ["pipe", "root", "shell"]
    assert {"processes", "clip", "acked", "port", "passes", "inputs"} <= read_of_workers().keys()


def test_every_field_of_the_header_is_in_a_class() -> None:
    assert NAMES["header"] == set(Header._fields)


@pytest.mark.parametrize(("frame", "spec"), [("a row of `table`", TensorSpec), ("a row of `tables`", TableSpec)])
def test_every_field_of_the_model_is_in_a_class(frame: str, spec: type) -> None:
    assert NAMES[frame] == {field.name for field in dataclasses.fields(spec)}


def test_every_frame_that_a_session_takes_is_in_the_list() -> None:
    tree = ast.parse(inspect.getsource(session))
    taken = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in Kind.__members__}
    answers = {"PARAM", "REWIND", "WELCOME", "WAITING", "CODEC", "INFO", "FINISHED"}
    frames = {word for field in FIELDS for word in field.frame.replace(",", " ").split()}
    records = {"RECORD", "RECORD_DELTA", "RECORD_PIECE", "RECORD_HAS"}  # the resume record's row
    assert taken - answers - records <= frames


def test_each_field_is_in_one_class_and_says_what_it_can_do() -> None:
    names = [(field.frame, field.name) for field in FIELDS]
    assert len(names) == len(set(names))
    assert {field.belief for field in FIELDS} == set(Belief)
    assert all(field.what and not field.what.endswith(".") for field in FIELDS)


def test_a_body_loses_what_is_in_no_class() -> None:
    assert known(Kind.INFO, {"clip": 1.0, "sudo": True}) == {"clip": 1.0}
    assert known(Kind.REPORT, {"loss": 1.0}) == {"loss": 1.0} and ANY in NAMES["REPORT"]
    assert known(Kind.STOP, {"anything": 1}) == {} == known(Kind.CHECKPOINT, {"x": 1})
