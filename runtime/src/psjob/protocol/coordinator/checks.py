"""Are a worker's model, tables and rule the job's? Sentences for the person who runs the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob.layout.blocks import TensorSpec


def rule_for(rule: str, update_at: str | None) -> str:
    """The shards' rule, as rank 0 found it from its optimizer (`reduce` where the workers step)."""
    return "reduce" if update_at == "worker" else rule


def rule_difference(rank: int, rule: str, theirs: str) -> str | None:
    """Where a worker's rule is not the job's, a sentence: the shards would take its numbers for those of theirs."""
    if theirs == rule:
        return None
    return (
        f"worker {rank}'s updates are of rule {theirs}, the job's of {rule}. Every worker must make the same optimizer, and a run that "
        "continues from another's checkpoint keeps its optimizer, training.updateAt and training.updateRule"
    )


def difference(rank: int, table: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """The first tensor in which a worker's table differs from the job's, as a sentence."""
    if table == theirs:
        return None
    for position, ours in enumerate(table):
        if position >= len(theirs):
            return f"worker {rank} has {len(theirs)} parameters, the job has {len(table)}: {ours.name} {list(ours.shape)} is missing"
        if (other := theirs[position]) != ours:
            said = f"worker {rank}'s parameter {position} is {_words(other)}; the job's is {_words(ours)}"
            return f"{said}; every worker must build the same model"
    return f"worker {rank} has {len(theirs)} parameters, the job has {len(table)}: {theirs[len(table)].name} is one too many"


def table_difference(rank: int, tables: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str | None:
    """The first table of rows in which a worker's differ from the job's, as a sentence. Tables are their specs' JSON."""
    for position, ours in enumerate(tables):
        if position >= len(theirs):
            return f"worker {rank} has {len(theirs)} tables of rows, the job has {len(tables)}: {ours['name']} is missing"
        other = theirs[position]
        for field, value in ours.items():
            if other[field] != value:
                said = f"worker {rank}'s table {position} ({other['name']}) has {field} {other[field]!r}"
                return f"{said}, the job's ({ours['name']}) {value!r}; every worker must build the same model"
    if len(theirs) > len(tables):
        return f"worker {rank} has {len(theirs)} tables of rows, the job has {len(tables)}: {theirs[len(tables)]['name']} is one too many"
    return None


def _words(spec: TensorSpec) -> str:
    stages = f" of stages {', '.join(map(str, spec.stages))}" if spec.stages else ""
    return f"{spec.name} {list(spec.shape)} {spec.dtype} in group {spec.group}{stages}"
