"""Are a worker's tables of rows the job's?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psjob.tables import TableSpec

MAX_TABLES = 10_000


def table_problem(theirs: Any) -> str | None:
    """Why a hello's tables cannot be those of a job, as a sentence; None where they can."""
    if theirs is None:
        return None
    if not isinstance(theirs, list) or len(theirs) > MAX_TABLES:
        return f"this worker's hello has no list of at most {MAX_TABLES} tables"
    try:
        names = [TableSpec.from_json(spec).name for spec in theirs]
    except (ValueError, TypeError) as error:
        return f"a table of this worker cannot be: {error}"
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    return None if twice is None else f"this worker has table {twice} twice"


def table_difference(rank: int, tables: Sequence[TableSpec], theirs: Any) -> str | None:
    """The first table in which a worker's differ from the job's, as a sentence."""
    problem = table_problem(theirs)
    if problem:
        return problem
    theirs = theirs or []
    for position, ours in enumerate(tables):
        if position >= len(theirs):
            return f"worker {rank} has {len(theirs)} tables of rows, the job has {len(tables)}: {ours.name} is missing"
        mine, other = ours.to_json(), TableSpec.from_json(theirs[position]).to_json()
        for field, value in mine.items():
            if other[field] != value:
                return (
                    f"worker {rank}'s table {position} ({other['name']}) has {field} {other[field]!r}, the job's ({ours.name}) {value!r}; "
                    "every worker must build the same model"
                )
    if len(theirs) > len(tables):
        extra = TableSpec.from_json(theirs[len(tables)]).name
        return f"worker {rank} has {len(theirs)} tables of rows, the job has {len(tables)}: {extra} is one too many"
    return None
