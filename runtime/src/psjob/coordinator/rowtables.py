"""Tables of rows as the coordinator knows them: are a worker's the job's, and where do a cut's rows lie?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import Manifest
from psjob.checkpoint.problems import CheckpointProblem
from psjob.checkpoint.rowplaces import RowPlaces
from psjob.tables import Partition, TableSpec

MAX_TABLES = 10_000


def tables_of(made: Manifest) -> tuple[TableSpec, ...]:
    """The tables of a manifest."""
    return () if made.rows is None else made.rows.specs


def row_places(written: Mapping[int, Mapping[str, Any]], specs: Sequence[TableSpec], newest: Manifest | None) -> RowPlaces | None:
    """Where a cut's rows lie, from what each shard has written; older files are those of the newest manifest. None without tables.

    Raises CheckpointProblem for any other file: nobody would keep it.
    """
    if not specs:
        return None
    bodies = [written[shard]["rows"] for shard in sorted(written)]
    known = {fact.name: fact for fact in (newest.rows.files if newest is not None and newest.rows is not None else ())}
    known |= {fact.name: fact for fact in (FileFact.from_json(body["file"]) for body in bodies)}
    chains = tuple(tuple(str(name) for name in body["chain"]) for body in bodies)
    for name in sorted({name for chain in chains for name in chain} - set(known)):
        raise CheckpointProblem(f"a shard names rows in {name[:80]}, which is not in the newest manifest")
    files = tuple(known[name] for name in sorted({name for chain in chains for name in chain}))
    return RowPlaces(tuple(specs), Partition.even(len(bodies)), chains, tuple(tuple(body["versions"]) for body in bodies), files)


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
