"""The manifest of a checkpoint: its rename is the commit, and what it lists is all that exists.

A reader takes the highest valid (term, step) of its run; damage means the one before it. Of tables of rows it says their specs, who had
which buckets, and each shard's chain of files. Of workers a checkpoint holds their resume records, and what rank 0 gave when the run
began.

`sweep_orphans` removes what void snapshots and earlier lives have left in a run's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from psjob.checkpoint import claim, disk, files
from psjob.checkpoint.disk import CheckpointProblem, Damage, explain_os_error
from psjob.checkpoint.files import FileFact
from psjob.layout import memory
from psjob.layout.blocks import Layout
from psjob.tables import Partition, TableSpec

MAX_CHAIN: Final = 8
"""Files of a chain, the first of which holds all rows: each is another that may be damaged, and another to read back."""


@dataclass(frozen=True)
class RowPlaces:
    """`chains[shard]` are files, the oldest first: all rows, then what changed. `versions[shard]` are the updates of each table there."""

    specs: tuple[TableSpec, ...]
    partition: Partition
    chains: tuple[tuple[str, ...], ...]
    versions: tuple[tuple[int, ...], ...]
    files: tuple[FileFact, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless every shard has a chain of listed files and a version a table."""
        listed = {fact.name for fact in self.files}
        for shard, (chain, versions) in enumerate(zip(self.chains, self.versions, strict=True)):
            if not 1 <= len(chain) <= MAX_CHAIN or not listed.issuperset(chain):
                raise ValueError(f"rows of shard {shard} are in {len(chain)} files, expected 1 to {MAX_CHAIN} of those that are listed")
            if len(versions) != len(self.specs) or not all(type(n) is int and n >= 0 for n in versions):
                raise ValueError(f"rows of shard {shard} have {len(versions)} versions, there are {len(self.specs)} tables")
        if max(self.partition.owners) >= len(self.chains):
            raise ValueError(f"buckets are with shard {max(self.partition.owners)}, rows with {len(self.chains)} shards")

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            "specs": [spec.to_json() for spec in self.specs],
            "partition": self.partition.to_json(),
            "chains": [list(chain) for chain in self.chains],
            "versions": [list(versions) for versions in self.versions],
            "files": [fact.to_json() for fact in self.files],
        }

    @classmethod
    def from_json(cls, obj: object) -> RowPlaces:
        """Read what `to_json` gave. Raises ValueError, TypeError or KeyError if it is not whole."""
        if not isinstance(obj, Mapping):
            raise ValueError("places of rows are an object")
        return cls(
            tuple(TableSpec.from_json(spec) for spec in obj["specs"]),
            Partition.from_json(obj["partition"]),
            tuple(tuple(str(name) for name in chain) for chain in obj["chains"]),
            tuple(tuple(versions) for versions in obj["versions"]),
            tuple(FileFact.from_json(fact) for fact in obj["files"]),
        )


RECORD = "record."
INITIAL = "initial"


def read_records(folder: Path, made: Manifest) -> dict[int, bytes]:
    """The resume records a manifest holds, by rank. Raises Damage or CheckpointProblem."""
    if made.records is None:
        return {}
    names = [name for name in made.records.tensors if name.startswith(RECORD)]
    tensors = files.read_blocks(folder / made.records.name, names, made.records)
    return {int(name.removeprefix(RECORD)): bytes(memory.view(tensor)) for name, tensor in tensors.items()}


def read_initial(folder: Path, made: Manifest) -> bytes:
    """What rank 0 gave when the run began, where the manifest has it; else empty. Raises Damage or CheckpointProblem."""
    if made.records is None or INITIAL not in made.records.tensors:
        return b""
    return bytes(memory.view(files.read_blocks(folder / made.records.name, [INITIAL], made.records)[INITIAL]))


FORMAT: Final = 2
MAX_BYTES: Final = 128 << 20
MAX_SHARDS: Final = 4096
"""Far above what a job may have: who reads a manifest counts to this number."""
_NAME = re.compile(r"manifest-v(\d{6,18})-s(\d{12,18})\.json")


@dataclass(frozen=True)
class BlockPlace:
    """In `file` lie `<index>.weights` and `<index>.<slot>`. Version: (attempt, n); `counts` is BlockState's."""

    index: int
    file: str
    attempt: int
    n: int
    counts: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """One consistent snapshot of all shards and workers. `step` is the sync step, in async the lowest clock."""

    run: str
    term: int
    step: int
    mode: str
    final: bool
    created: float
    layout: Layout
    rule: str
    update_at: str
    shards: int
    assignment: tuple[int, ...]
    blocks: tuple[BlockPlace, ...]
    files: tuple[FileFact, ...]
    workers: Mapping[str, Mapping[str, Any]]
    """By rank, from 0: clock, start, rewinds, leftAt, which is None where it has not left, and `record` where its resume record is of
    an older clock: that clock."""
    tables: Mapping[str, FileFact] = field(default_factory=dict)
    """By shard: the file that tells what it had taken of each worker (psjob.checkpoint.admission)."""
    counters: Mapping[str, Any] = field(default_factory=dict)
    spec_hash: str = ""
    generation: int = 1
    records: FileFact | None = None
    """The workers' resume records: tensors `record.<rank>` of bytes."""
    buffers: FileFact | None = None
    """The model's buffers, by their names in its state_dict."""
    rows: RowPlaces | None = None
    """Tables of rows, where the job has any."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT
    request: int | None = None
    """The checkpoint.request that it answers; manifests of runs that were never asked for one do not have it."""

    @property
    def name(self) -> str:
        """The file's name."""
        return f"manifest-v{self.term:06d}-s{self.step:012d}.json"

    @property
    def bytes(self) -> int:
        """Size of all files it lists."""
        return sum(fact.bytes for fact in self.listed())

    def listed(self) -> list[FileFact]:
        """Every file of this checkpoint but the manifest itself."""
        rows = () if self.rows is None else self.rows.files
        return [*self.files, *rows, *self.tables.values(), *(fact for fact in (self.records, self.buffers) if fact is not None)]

    def fact(self, name: str) -> FileFact:
        """The facts of the file `name`. Raises Damage if the manifest does not list it."""
        for fact in self.listed():
            if fact.name == name:
                return fact
        raise Damage(self.name, f"facts of {name}", "none")


def commit(folder: Path, made: Manifest, owner: str | None = None) -> Path:
    """Make `made` the run's newest checkpoint; its files must be written. Returns the manifest's path.

    Raises CheckpointProblem, and Fenced where a higher term (or this one by another pod than `owner`) has claimed the run. That is seen
    before the rename, or after it, when the newer term may not have seen this manifest.
    """
    claim.check_claim(folder, made.term, owner)
    raw = encode(made)
    if len(raw) > MAX_BYTES:
        raise CheckpointProblem(f"manifest {made.name} would have {len(raw)} bytes, at most {MAX_BYTES} are allowed")
    disk.write_whole(folder, made.name, [raw])
    claim.check_claim(folder, made.term, owner)
    return folder / made.name


def newest_manifest(
    folder: Path, run: str | None, whole: bool = True, passed: Set[str] = frozenset(), also: Callable[[Manifest], None] = lambda made: None
) -> tuple[Manifest | None, list[str]]:  # fmt: skip
    """The highest (term, step) of `run` (None: whichever run the folder holds) that is whole to the last byte.

    Not `whole`: its files need only be there, with their sizes; who reads one checks the bytes. Names in `passed` are not taken, nor those
    for which `also` raises CheckpointProblem. The second value says, one sentence each, what was passed over on the way.
    Raises CheckpointProblem if the folder cannot be listed, or a file not be read: passing over it could lose durable steps.
    """
    problems: list[str] = []
    for _, _, name in reversed(listing(folder)):
        if name in passed:
            continue
        try:
            made = read_manifest(folder, name)
            if run is not None and made.run != run:
                problems.append(f"{name} is of run {made.run[:64]}, not of {run}")
                continue
            for fact in made.listed():
                (files.check_file if whole else _there)(folder / fact.name, fact)
            also(made)
            return made, problems
        except CheckpointProblem as problem:
            if isinstance(problem.__cause__, OSError) and not isinstance(problem, Damage):
                raise
            problems.append(f"checkpoint {name} is passed over: {problem}")
    return None, problems


def _there(path: Path, fact: FileFact) -> None:
    """Raise Damage unless a regular file of the right size is there."""
    with disk.opened_regular(path) as (_, size):
        if size != fact.bytes:
            raise Damage(path.name, f"{fact.bytes} bytes", f"{size} bytes")


def is_over(folder: Path, run: str) -> bool:
    """Has this run its final manifest? No file that it lists is looked at. Raises CheckpointProblem if the folder cannot be listed."""
    for _, _, name in reversed(listing(folder)):
        with contextlib.suppress(CheckpointProblem):
            made = read_manifest(folder, name)
            if made.run == run:
                return made.final
    return False


def read_manifest(folder: Path, name: str) -> Manifest:
    """The manifest `name` of `folder`, checked against its own hash; the files it lists are not. Raises Damage or CheckpointProblem."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointProblem(f"{name[:80]!r} is no manifest's name")
    made = decode(disk.read_small(folder / name, MAX_BYTES), name)
    if made.name != name:
        raise Damage(name, "a manifest of that term and step", f"{made.name}")
    return made


def prune(folder: Path, keep: int, newest: Manifest) -> list[str]:
    """Remove this run's manifests beyond the `keep` newest, then what no manifest lists any more; returns what was to go.

    Kept are final manifests, whatever is of another run, of a higher term or of a later snapshot than `newest`'s. Raises Fenced first
    where a higher term has claimed the run. A disk that fails here is no error: what stays is tried again the next time.
    """
    claim.check_claim(folder, newest.term)
    claim.remove_older_claims(folder, newest.term)
    kept: list[Manifest] = []
    gone: list[str] = []
    ordinary = 0
    for term, step, name in reversed(listing(folder)):
        try:
            made = read_manifest(folder, name)
        except CheckpointProblem:
            if kept and (term, step) < (newest.term, newest.step):
                gone.append(name)
            continue
        if made.run == newest.run and not made.final and (term, step) <= (newest.term, newest.step):
            ordinary += 1
            if ordinary > max(1, keep):
                gone.append(name)
                continue
        kept.append(made)
    try:
        for name in gone:
            try_remove(folder, name)
        if gone:
            disk.sync_folder(folder)  # a manifest must be gone before the files it lists
        if all(made.run == newest.run for made in kept):
            for name in _leftovers(folder, kept, newest):
                try_remove(folder, name)
                gone.append(name)
    except (OSError, CheckpointProblem):
        return gone
    return gone


def _leftovers(folder: Path, kept: list[Manifest], newest: Manifest) -> list[str]:
    """Data and temp files that are older than `newest`'s own and in no manifest that is kept."""
    listed = {fact.name for made in kept for fact in made.listed()}
    limit = max((age for fact in newest.listed() if (age := age_of(fact.name)) is not None), default=(newest.term, -1))
    found = []
    for name in sorted(os.listdir(folder)):
        plain = name.removesuffix(disk.TEMP)
        age, match = age_of(plain), _NAME.fullmatch(plain)
        old = age is not None and age < limit
        stale = match is not None and plain != name and (int(match[1]), int(match[2])) < (newest.term, newest.step)
        if (old or stale) and name not in listed:
            found.append(name)
    return found


def encode(made: Manifest) -> bytes:
    """JSON with the sha256 of all else inside. The term is stored as `view`, as older checkpoints have it; file names have `v`."""
    body: dict[str, Any] = {
        "format": made.format,
        "run": made.run,
        "view": made.term,
        "step": made.step,
        "mode": made.mode,
        "final": made.final,
        "created": made.created,
        "layout": made.layout.to_json(),
        "layoutDigest": made.layout.digest(),
        "rule": made.rule,
        "updateAt": made.update_at,
        "shards": made.shards,
        "generation": made.generation,
        "assignment": list(made.assignment),
        "blocks": [[b.index, b.file, b.attempt, b.n, dict(b.counts)] for b in made.blocks],
        "files": [fact.to_json() for fact in made.files],
        "workers": _columns(made.workers),
        "tables": {shard: fact.to_json() for shard, fact in made.tables.items()},
        "counters": dict(made.counters),
        "specHash": made.spec_hash,
        "records": None if made.records is None else made.records.to_json(),
        "buffers": None if made.buffers is None else made.buffers.to_json(),
        "rows": None if made.rows is None else made.rows.to_json(),
        "extra": dict(made.extra),
    } | ({} if made.request is None else {"request": made.request})
    try:
        body["sha256"] = _hash(body)
        return json.dumps(body, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointProblem(f"manifest {made.name} holds what JSON cannot: {error}") from None


def decode(raw: bytes, name: str) -> Manifest:
    """Read what `encode` gave. Raises Damage, naming the file."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damage(name, "JSON", str(error)[:200]) from None
    if not isinstance(body, dict):
        raise Damage(name, "an object", type(body).__name__)
    if type(body.get("format")) is int and body["format"] > FORMAT:
        raise Damage(name, f"format {FORMAT} or lower", f"format {body['format']}: a newer psjob wrote it")
    if type(body.get("format")) is int and 0 < body["format"] < FORMAT:
        raise CheckpointProblem(
            f"manifest {name} has format {body['format']}, this psjob reads {FORMAT}: an older psjob wrote it, and can end the run"
        )
    said = body.pop("sha256", None)
    try:
        if said != (found := _hash(body)):
            raise Damage(name, f"sha256 {str(said)[:64]}", found)
        return _manifest(body)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise Damage(name, "a whole manifest", f"{type(error).__name__}: {str(error)[:200]}") from None


def _manifest(body: Mapping[str, Any]) -> Manifest:
    layout = Layout.from_json(body["layout"])
    if layout.digest() != body["layoutDigest"]:
        raise ValueError("its layout is not the one of its digest")
    blocks = tuple(BlockPlace(_count(b[0]), _text(b[1]), _count(b[2]), _count(b[3]), _object(b[4])) for b in body["blocks"])
    facts = tuple(FileFact.from_json(fact) for fact in body["files"])
    made = Manifest(
        run=_text(body["run"]),
        term=_count(body["view"]),
        step=_count(body["step"]),
        mode=_text(body["mode"]),
        final=body["final"] is True,
        created=float(body["created"]),
        layout=layout,
        rule=_text(body["rule"]),
        update_at=_text(body["updateAt"]),
        shards=_count(body["shards"], MAX_SHARDS),
        assignment=tuple(_count(shard) for shard in body["assignment"]),
        blocks=blocks,
        files=facts,
        workers=_workers(_object(body["workers"])),
        tables={shard: FileFact.from_json(fact) for shard, fact in _object(body["tables"]).items()},
        counters=_object(body["counters"]),
        spec_hash=_text(body["specHash"]),
        generation=_count(body["generation"]),
        extra=_object(body["extra"]),
        format=_count(body["format"]),
        request=None if body.get("request") is None else _count(body["request"]),
    )
    made = replace(
        made,
        records=None if body["records"] is None else FileFact.from_json(body["records"]),
        buffers=None if body["buffers"] is None else FileFact.from_json(body["buffers"]),
        rows=None if body.get("rows") is None else RowPlaces.from_json(body["rows"]),
    )
    _consistent(made)
    return made


def _columns(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int | None]]:
    """Workers by column, ranks in order: a manifest of thousands of them stays small."""
    rows = [workers[str(rank)] for rank in range(len(workers))]
    older = {"record": [row.get("record") for row in rows]} if any(row.get("record") is not None for row in rows) else {}
    return older | {
        "clock": [row["clock"] for row in rows],
        "start": [row.get("start", 0) for row in rows],
        "rewinds": [row.get("rewinds", 0) for row in rows],
        "leftAt": [row.get("leftAt") for row in rows],
    }


def _workers(columns: Mapping[str, Any]) -> dict[str, dict[str, int | None]]:
    clocks, starts, rewinds, left = (columns[key] for key in ("clock", "start", "rewinds", "leftAt"))
    records = columns.get("record") or [None] * len(clocks)
    return {
        str(rank): {
            "clock": _count(clock), "start": _count(start), "rewinds": _count(again), "leftAt": None if gone is None else _count(gone),
        } | ({} if record is None else {"record": _count(record)})
        for rank, (clock, start, again, gone, record) in enumerate(zip(clocks, starts, rewinds, left, records, strict=True))
    }  # fmt: skip


def _consistent(made: Manifest) -> None:
    """Raise ValueError unless every block of the layout lies in exactly one listed file."""
    names = {fact.name: fact for fact in made.files}
    if sorted(block.index for block in made.blocks) != list(range(len(made.layout.blocks))):
        raise ValueError(f"it has {len(made.blocks)} blocks, its layout {len(made.layout.blocks)}")
    for block in made.blocks:
        if block.file not in names or f"{block.index}.weights" not in names[block.file].tensors:
            raise ValueError(f"block {block.index} is said to be in {block.file[:80]}, which does not list it")
    if len(made.assignment) != len(made.layout.blocks) or any(shard >= made.shards for shard in made.assignment):
        raise ValueError("its assignment does not fit its blocks and shards")
    if made.rows is not None and len(made.rows.chains) != made.shards:
        raise ValueError(f"it has rows of {len(made.rows.chains)} shards, there were {made.shards}")


def listing(folder: Path) -> list[tuple[int, int, str]]:
    """(term, step, name) of all manifests, lowest first."""
    try:
        names: Iterable[str] = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explain_os_error(error, "list the folder", folder) from error
    return sorted((int(match[1]), int(match[2]), name) for name in names if (match := _NAME.fullmatch(name)))


def age_of(name: str) -> tuple[int, int] | None:
    """(term, snapshot) of a data file, from its name `v<term>-c<snapshot>-…`."""
    match = re.match(r"v(\d{6,18})-c(\d{6,18})-", name)
    return None if match is None else (int(match[1]), int(match[2]))


def try_remove(folder: Path, name: str) -> None:
    """What cannot be removed now is tried again at the next prune: a full or read-only disk must not undo a commit."""
    with contextlib.suppress(OSError):
        os.unlink(folder / name)


def _hash(body: Mapping[str, Any]) -> str:
    raw = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(raw.encode()).hexdigest()


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} is not an object")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 512:
        raise ValueError(f"{str(value)[:40]!r} is not a short text")
    return value


def _count(value: object, most: int = 1 << 63) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number from 0 to {most}")
    return value


def sweep_orphans(folder: Path, term: int, before: int) -> list[str]:
    """Remove what snapshots below number `before` have left and no manifest lists, of whatever term; returns what was to go.

    Nothing is removed where a manifest cannot be read, for what it lists is not known, and where the folder holds another run too. Raises
    Fenced where a higher term than `term` has claimed the run, CheckpointProblem where the folder cannot be listed.
    """
    claim.check_claim(folder, term)
    listed: set[str] = set()
    runs: set[str] = set()
    for _, _, name in listing(folder):
        try:
            made = read_manifest(folder, name)
        except Damage:
            continue  # nobody can continue from it
        except CheckpointProblem:
            return []
        runs.add(made.run)
        listed.update(fact.name for fact in made.listed())
    if len(runs) > 1:
        return []
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise explain_os_error(error, "list the folder", folder) from error
    gone = [name for name in names if (age := age_of(name)) is not None and age[1] < before and name not in listed]
    for name in gone:
        try_remove(folder, name)
    return gone
