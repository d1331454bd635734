"""The coordinator's work on disk: claims, the newest manifest, and a commit, whose rename makes a snapshot a checkpoint.

One thread does it, first in, first out: a read that is asked for after a commit sees that commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from psjob import modes
from psjob.checkpoint import claim, disk, files, final, manifest
from psjob.checkpoint.disk import CheckpointProblem
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import INITIAL, RECORD, BlockPlace, Manifest, RowPlaces, read_initial, read_records, sweep_orphans
from psjob.process import config
from psjob.process.config import ProcessContext
from psjob.process.errors import Fenced
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator.events import CheckpointFacts, WorkerFacts
from psjob.resume import record
from psjob.tables import Partition, TableSpec

log = logging.getLogger("psjob.coordinator")
Job = (
    events.ClaimTerm | events.LookForClaim | events.ReadNewest | events.CommitSnapshot | events.SweepOrphans | events.MeasureRoom
    | events.ReadWish
)  # fmt: skip


@dataclass(frozen=True)
class RowPart:
    """A shard's rows in a snapshot: the file it wrote, the chain of files they lie in, and how often each table was updated."""

    file: FileFact
    chain: tuple[str, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class ShardPart:
    """What a shard has written of a snapshot. `file` is None where none of its blocks has changed."""

    file: FileFact | None
    blocks: tuple[BlockPlace, ...]
    table: FileFact
    rows: RowPart | None


def read_part(body: Mapping[str, Any]) -> ShardPart:
    """The `content` of a SnapshotWritten. Raises ValueError, KeyError or TypeError if it is not in shape."""
    blocks = tuple(BlockPlace(int(b["index"]), str(b["file"]), int(b["attempt"]), int(b["n"]), dict(b["counts"])) for b in body["blocks"])
    rows = body.get("rows")
    part = None
    if rows is not None:
        part = RowPart(
            FileFact.from_json(rows["file"]), tuple(str(name) for name in rows["chain"]), tuple(int(n) for n in rows["versions"])
        )
    file = None if body["file"] is None else FileFact.from_json(body["file"])
    return ShardPart(file, blocks, FileFact.from_json(body["table"]["file"]), part)


class DiskWork:
    """Of one coordinator. Runs in one thread."""

    def __init__(self, place: ProcessContext, folder: Path) -> None:
        self.place, self.folder = place, folder
        self._newest: Manifest | None = None
        """The newest manifest that this coordinator has committed: unchanged blocks and rows lie in its files."""
        self._buffers: FileFact | None = None
        """Those of the newest checkpoint of this run: they stay what they are when the worker that has them has left."""

    def carry_out(self, job: Job) -> events.Event | None:
        """Do it; what became of it."""
        try:
            return self._carry_out(job)
        except Fenced as fenced:
            return events.TermFenced(fenced.term, str(fenced))

    def _carry_out(self, job: Job) -> events.Event | None:
        match job:
            case events.ClaimTerm(term):
                return self._claim(term)
            case events.LookForClaim(term):
                try:
                    claim.check_claim(self.folder, term, self.place.pod)
                except CheckpointProblem as problem:
                    log.debug("no claim can be looked for: %s", problem)
                return events.ClaimSeen()
            case events.ReadNewest():
                return self._read(job)
            case events.CommitSnapshot():
                return self._commit(job)
            case events.SweepOrphans(term, before):
                try:
                    gone = sweep_orphans(self.folder, term, before)
                except CheckpointProblem as problem:
                    log.warning("files of void checkpoints stay: %s", problem)
                else:
                    if gone:
                        log.info("removed %d files of void checkpoints", len(gone))
                return None
            case events.MeasureRoom():
                return events.RoomMeasured(disk.free_bytes(self.folder))
            case events.ReadWish():
                return self._wish()

    def _claim(self, term: int) -> events.Event:
        try:
            claim.claim_term(self.folder, term, self.place.pod)
        except CheckpointProblem as problem:
            return events.TermUnclaimed(term, str(problem), problem.full)
        return events.TermClaimed(term)

    def _wish(self) -> events.Event:
        found = config.desired_config(self.place)
        if found is None:
            return events.ModeWished(None)
        try:
            return events.ModeWished(modes.of(found), request=found.checkpoint.request)
        except ValueError as error:
            return events.ModeWished(None, str(error), found.checkpoint.request)

    # -- reading -------------------------------------------------------------------------------

    def _read(self, job: events.ReadNewest) -> events.Event:
        """The newest manifest of this run; of the run to resume from where this one has none yet."""
        claim.check_claim(self.folder, job.term)
        resume = self.place.config.checkpoint.resume_from
        problems: list[str] = []
        for folder, run in ((self.folder, self.place.run), *(((Path(resume), None),) if resume else ())):
            held: dict[int, bytes] = {}
            initial = b""

            def also(made: Manifest, folder: Path = folder) -> None:
                nonlocal held, initial
                if job.records:
                    held, initial = read_records(folder, made), read_initial(folder, made)

            try:
                made, passed = manifest.newest_manifest(folder, run, whole=False, passed=job.passed, also=also)
            except CheckpointProblem as problem:
                return events.NewestRead(job.number, None, (str(problem),), failed=True)
            problems += passed
            if made is not None:
                self._buffers = made.buffers if folder == self.folder else None
                found = facts_of(folder, made)
                return events.NewestRead(job.number, found, tuple(problems), records=held if job.records else None, initial=initial)
        return events.NewestRead(job.number, None, tuple(problems))

    # -- committing ----------------------------------------------------------------------------

    def _commit(self, job: events.CommitSnapshot) -> events.Event:
        began = time.time()
        written: list[str] = []
        try:
            made = self._manifest(job)
            claim.check_claim(self.folder, job.term, self.place.pod)
            made = self._with_records(job, made, written)
            if job.final:
                digest = final.checkpoint_sha256(self.folder, made)
                made = replace(made, extra={**made.extra, "weightsSha256": digest})
                final.write_final(self.folder, made, made.extra.get("aliases"))
            path = manifest.commit(self.folder, made, self.place.pod)
        except CheckpointProblem as problem:
            log.warning("checkpoint not committed: %s", problem)
            for name in written:
                manifest.try_remove(self.folder, name)
            return events.ManifestUncommitted(job.snapshot, str(problem), problem.full)
        self._newest, self._buffers = made, made.buffers
        manifest.prune(self.folder, self.place.config.checkpoint.keep, made)
        log.info("checkpoint of step %d committed in %.2f s: %s", made.step, time.time() - began, path.name)
        return events.ManifestCommitted(job.snapshot, facts_of(self.folder, made))

    def _manifest(self, job: events.CommitSnapshot) -> Manifest:
        parts: Mapping[int, ShardPart] = job.parts
        blocks = tuple(block for _, part in sorted(parts.items()) for block in part.blocks)
        specs = [TableSpec.from_json(spec) for spec in job.tables]
        workers = {
            str(rank): {"clock": w.clock, "start": w.start, "rewinds": w.rewinds, "leftAt": w.left}
            | ({} if w.record is None else {"record": w.record})
            for rank, w in enumerate(job.workers)
        }
        return Manifest(
            run=self.place.run, term=job.term, step=job.step, mode=job.mode, final=job.final, created=time.time(), layout=job.layout,
            rule=job.rule, update_at="worker" if job.rule == "reduce" else "server", shards=len(parts), assignment=job.assignment,
            blocks=blocks, files=self._files(parts, blocks), rows=row_places(parts, specs, self._newest), workers=workers,
            tables={str(shard): part.table for shard, part in sorted(parts.items())},
            spec_hash=self.place.config.spec_hash, extra={"aliases": dict(job.aliases)}, request=job.request,
        )  # fmt: skip

    def _files(self, parts: Mapping[int, ShardPart], blocks: Sequence[BlockPlace]) -> tuple[FileFact, ...]:
        """What the shards have written, then the files of the newest manifest in which unchanged blocks lie.

        Raises CheckpointProblem for any other file: nobody would keep it.
        """
        facts = [part.file for _, part in sorted(parts.items()) if part.file is not None]
        new = {fact.name for fact in facts}
        older = {fact.name: fact for fact in (self._newest.files if self._newest is not None else ())}
        for name in sorted({block.file for block in blocks} - new):
            if name not in older:
                raise CheckpointProblem(f"a shard names blocks in {name[:80]}, which is not in the newest manifest")
            facts.append(older[name])
        return tuple(facts)

    def _with_records(self, job: events.CommitSnapshot, made: Manifest, written: list[str]) -> Manifest:
        """Put the workers' records, and the model's buffers, into files of their own. Each one's name goes into `written`."""
        held = [(f"{RECORD}{rank}", _bytes(blob)) for rank, blob in job.records.items()]
        if job.initial:
            held.append((INITIAL, _bytes(job.initial)))
        stem = f"v{job.term:06d}-c{job.snapshot:06d}"
        if held:
            made = replace(made, records=self._write(f"{stem}-records.safetensors", held, written))
        buffers = _buffers(job.buffers)
        if buffers:
            return replace(made, buffers=self._write(f"{stem}-buffers.safetensors", buffers, written))
        return replace(made, buffers=self._buffers)

    def _write(self, name: str, held: Sequence[tuple[str, torch.Tensor]], written: list[str]) -> FileFact:
        written.append(name)
        return files.write_blocks(self.folder, name, held, {"run": self.place.run})


def _buffers(blobs: Sequence[bytes]) -> list[tuple[str, torch.Tensor]]:
    """The buffers of the model's state_dict in these records, by name. Raises CheckpointProblem if one is none."""
    found: dict[str, torch.Tensor] = {}
    try:
        for blob in blobs:
            found |= record.buffers_of(blob)
    except ValueError as error:
        raise CheckpointProblem(f"a resume record is not in shape ({error}); run one version of psjob in all pods") from None
    return sorted(found.items())


def row_places(parts: Mapping[int, ShardPart], specs: Sequence[TableSpec], newest: Manifest | None) -> RowPlaces | None:
    """If a snapshot's rows lie, from what each shard has written; older files are those of the newest manifest. None without tables.

    Raises CheckpointProblem for any other file: nobody would keep it.
    """
    if not specs:
        return None
    rows = [part.rows for _, part in sorted(parts.items()) if part.rows is not None]
    if len(rows) != len(parts):
        raise CheckpointProblem(f"{len(parts) - len(rows)} shards have written no rows, the job has {len(specs)} tables")
    known = {fact.name: fact for fact in (newest.rows.files if newest is not None and newest.rows is not None else ())}
    known |= {part.file.name: part.file for part in rows}
    chains = tuple(part.chain for part in rows)
    for name in sorted({name for chain in chains for name in chain} - set(known)):
        raise CheckpointProblem(f"a shard names rows in {name[:80]}, which is not in the newest manifest")
    held = tuple(known[name] for name in sorted({name for chain in chains for name in chain}))
    try:
        return RowPlaces(tuple(specs), Partition.even(len(rows)), chains, tuple(part.versions for part in rows), held)
    except ValueError as error:
        raise CheckpointProblem(str(error)) from None


def facts_of(folder: Path, made: Manifest) -> CheckpointFacts:
    """A manifest as the machine knows it."""
    workers = tuple(
        WorkerFacts(int(w["clock"]), int(w["start"]), int(w["rewinds"]), w["leftAt"], w.get("record"))
        for w in (made.workers[str(rank)] for rank in range(len(made.workers)))
    )
    tables = () if made.rows is None else tuple(spec.to_json() for spec in made.rows.specs)
    return CheckpointFacts(
        str(folder), made.name, made.run, made.term, made.step, made.mode, made.final, made.created, made.bytes, made.layout, made.rule,
        workers, tables, tuple(sorted((str(a), str(b)) for a, b in dict(made.extra.get("aliases") or {}).items())),
        made.extra.get("weightsSha256"), made.request,
    )  # fmt: skip


def _bytes(blob: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8, device="cpu")
