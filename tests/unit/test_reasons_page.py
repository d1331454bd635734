"""Every reason, Event, cause, label and annotation that the operator's code writes stands in docs/reasons.md, and no other does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hack import reasonspage
from psjob_operator.api.crd import STATUS_DEFAULT
from psjob_operator.contract import GROUP
from psjob_operator.plan.conditions import OF_TRAINING
from psjob_operator.plan.process_outcome import UNCOUNTED

OPERATOR = Path(__file__).resolve().parents[2] / "operator/src/psjob_operator"
TREES = {
    path: ast.parse(path.read_text()) for path in sorted(OPERATOR.rglob("*.py")) if path.parent.name in ("plan", "cluster", "render", "api")
}
NAMED = {
    target.id: node.value.value
    for tree in TREES.values()
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    for target in node.targets
    if isinstance(target, ast.Name)
}
"""Constants of modules that are text."""
WORD = re.compile(r"[A-Z][A-Za-z]+")
PLACES = {"Say": 1, "Trouble": 1, "starting": 0, "running": 0, "_stall": 1, "_wait": 1, "Ending": 1}
"""Calls that make a condition, and the place of its reason."""


def words(*nodes: ast.AST | None) -> set[str]:
    """Words that stand in these parts of the code, by themselves or by the name of a constant."""
    found = [one for node in nodes if node is not None for one in ast.walk(node)]
    texts = [one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    texts += [NAMED[one.id] for one in found if isinstance(one, ast.Name) and one.id in NAMED]
    return {text for text in texts if WORD.fullmatch(text)}


def arguments(name: str, place: int) -> Iterator[ast.AST]:
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name and len(node.args) > place:
                yield node.args[place]


def parts(kind: type[ast.AST], function: str) -> Iterator[ast.AST]:
    """Nodes of a kind in functions of that name."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                yield from (one for one in ast.walk(node) if isinstance(one, kind))


def fatal_causes() -> set[str]:
    calls = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    outcomes = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ProcessOutcome" and len(call.args) > 1]
    return set().union(*(words(call.args[1]) for call in outcomes if "fatal" in ast.unparse(call.args[0])))


def causes() -> set[str]:
    return set().union(*(words(node) for node in arguments("ProcessOutcome", 1)), words(*parts(ast.Return, "cause"))) | set(
        UNCOUNTED.values()
    )


def test_every_reason_of_a_condition_is_in_the_table_and_no_other() -> None:
    emitted = set().union(*(words(*arguments(name, place)) for name, place in PLACES.items()))
    yields = [node.value for function in ("_around", "_unread") for node in parts(ast.Yield, function) if isinstance(node, ast.Yield)]
    emitted |= words(*(pair.elts[0] for pair in yields if isinstance(pair, ast.Tuple)))
    returned = [
        node.value for function in ("leaving", "waits_for_source") for node in parts(ast.Return, function) if isinstance(node, ast.Return)
    ]
    emitted |= words(*(pair.elts[0] for pair in returned if isinstance(pair, ast.Tuple)))
    emitted |= words(*parts(ast.Return, "spec_reason")) | set(OF_TRAINING) | fatal_causes()
    emitted |= {condition["reason"] for condition in STATUS_DEFAULT["conditions"]} | {"Waiting"}
    assert emitted == set(reasonspage.REASONS)


def test_every_event_is_in_the_table_and_no_other() -> None:
    of_suspension = {"Suspending", "Suspended"}
    assert words(*arguments("Event", 1)) | of_suspension == set(reasonspage.EVENTS)


def test_every_cause_is_in_the_table_and_no_other() -> None:
    also = {"UnfinishedExit"}
    assert causes() - fatal_causes() | also == set(reasonspage.CAUSES)


def test_every_label_and_annotation_is_in_a_table_and_no_other() -> None:
    text = "".join(path.read_text() for path in TREES)
    ours = {f"{GROUP}/{name}" for name in re.findall(r"\{GROUP\}/([a-z-]+)", text)}
    others = set(re.findall(r'"((?:app\.kubernetes\.io|kubectl\.kubernetes\.io/default)[-a-z/]+)"', text))
    assert ours | others == set(reasonspage.LABELS) | set(reasonspage.ANNOTATIONS)
