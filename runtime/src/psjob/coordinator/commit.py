"""Committing a cut: records file, final weights, then the manifest, whose rename is the commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from psjob.checkpoint import claim, files, final, manifest
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import BlockPlace, Manifest
from psjob.checkpoint.problems import CheckpointProblem
from psjob.coordinator.cuts import Cut
from psjob.coordinator.rowtables import row_places
from psjob.resume import record

if TYPE_CHECKING:
    from psjob.coordinator.coordinator import Coordinator

log = logging.getLogger("psjob.coordinator")


class Committer:
    """Turns a finished cut into a manifest."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self.base: int | None = None
        """The cut that the newest manifest of this coordinator holds: what has not changed since need not be written again."""
        self._newest: Manifest | None = None

    def commit(self, cut: Cut) -> Manifest | None:
        """Write the manifest of a cut that every shard has written; None when that failed.

        Raises Fenced when a higher view has claimed the run: this process must end.
        """
        c = self.c
        began = time.time()
        c.busy()
        try:
            made = self._manifest(cut)
            claim.check(c.folder, c.views.view, c.place.pod)
            made = self._with_records(cut, made)
            if cut.final:
                digest = final.checkpoint_sha256(c.folder, made)
                made = replace(made, extra={**made.extra, "weightsSha256": digest})
                final.write_final(c.folder, made, made.extra.get("aliases"))
            path = manifest.commit(c.folder, made, c.place.pod)
            self.base, self._newest = cut.number, made
            manifest.prune(c.folder, c.config.checkpoint.keep, made)
        except CheckpointProblem as problem:
            c.progress.checkpoint_problem = str(problem)
            log.warning("checkpoint not committed: %s", problem)
            return None
        c.progress.checkpoint_problem = None
        if made.step > 0:
            c.progress.committed += 1
        self.adopt(made)
        log.info("checkpoint of step %d committed in %.2f s: %s", made.step, time.time() - began, path.name)
        if c.views.initialising:
            c.views.initial_committed(c.folder, made)
        return made

    def adopt(self, made: Manifest) -> None:
        """This manifest is the newest: show it."""
        c = self.c
        c.progress.checkpoint = {
            "step": made.step, "view": made.view, "time": made.created, "bytes": made.bytes,
            "path": made.name, "final": made.final,
        }  # fmt: skip
        if made.final:
            c.progress.weights_sha256 = made.extra.get("weightsSha256")

    def _manifest(self, cut: Cut) -> Manifest:
        c = self.c
        blocks = tuple(
            BlockPlace(entry["index"], entry["file"], entry["attempt"], entry["n"], entry["counts"])
            for _shard, body in sorted(cut.written.items())
            for entry in body["blocks"]
        )
        told = {str(shard): body["table"] for shard, body in sorted(cut.written.items())}
        tables = {shard: table["file"] for shard, table in told.items()}
        rows = row_places(cut.written, [cell.spec for cell in c.store.row_cells.values()], self._newest)
        clocks = cut.clocks or self._clocks(
            [*(place.n for place in blocks), *(n for of in (rows.versions if rows else ()) for n in of)], told
        )
        workers: dict[str, Any] = {}
        for member in c.members.all.values():
            left = _left(told, member.rank)
            workers[str(member.rank)] = {
                "clock": clocks[member.rank], "start": member.incarnation[0], "rewinds": member.incarnation[1], "leftAt": left,
            }  # fmt: skip
        live = [clocks[m.rank] for m in c.members.all.values() if workers[str(m.rank)]["leftAt"] is None]
        step = min(live) if live else max(clocks.values())
        if cut.clocks is not None:
            step = max((place.n for place in blocks), default=0)  # updates, whoever made them
        assert c.store.layout is not None
        return Manifest(
            run=c.place.run, view=c.views.view, step=step, mode=c.mode.name,
            final=cut.final, created=time.time(), layout=c.store.layout, rule=c.store.rule_name,
            update_at="worker" if c.store.rule_name == "reduce" else "server", shards=len(c.config.shards),
            assignment=c.store.assignment, blocks=blocks,
            files=self._files(cut, blocks), rows=rows, workers=workers, tables=tables,
            spec_hash=c.config.spec_hash, extra={"aliases": c.views.aliases},
        )  # fmt: skip

    def _files(self, cut: Cut, blocks: tuple[BlockPlace, ...]) -> tuple[FileFact, ...]:
        """What the shards have written, then the files of the newest manifest in which unchanged blocks lie.

        Raises CheckpointProblem for any other file: nobody would keep it.
        """
        facts = [FileFact.from_json(body["file"]) for _shard, body in sorted(cut.written.items()) if body["file"] is not None]
        new = {fact.name for fact in facts}
        older = {fact.name: fact for fact in (self._newest.files if self._newest is not None else ())}
        for name in sorted({block.file for block in blocks} - new):
            if name not in older:
                raise CheckpointProblem(f"a shard names blocks in {name[:80]}, which is not in the newest manifest")
            facts.append(older[name])
        return tuple(facts)

    def _clocks(self, versions: Sequence[int], tables: dict[str, Any]) -> dict[int, int]:
        """Each worker's clock at the cut: the step where versions are clocks, else the one clock that all shards have of it."""
        ranks = list(self.c.members.all)
        if self.c.mode.ahead == 0:
            step = max(versions, default=0)
            return dict.fromkeys(ranks, step)
        clocks: dict[int, int] = {}
        for rank in ranks:
            seen = {
                int(table["complete"][rank])
                for shard, table in tables.items()
                if self.c.store.row_cells or self.c.store.assignment.count(int(shard))
            }
            if len(seen) > 1:
                raise CheckpointProblem(f"shards disagree on worker {rank}'s clock at a cut, a stream broke in it: {sorted(seen)}")
            clocks[rank] = seen.pop() if seen else 0
        return clocks

    def _with_records(self, cut: Cut, made: Manifest) -> Manifest:
        """Put the workers' records into one file of their own and name it in the manifest."""
        c = self.c
        held: list[tuple[str, torch.Tensor]] = []
        for rank, entry in made.workers.items():
            member = c.members[int(rank)]
            blob = member.records.get(entry["clock"]) if cut.clocks is None else member.newest(entry["clock"])
            if blob is not None and entry["leftAt"] is None:
                held.append((f"record.{rank}", torch.frombuffer(bytearray(blob), dtype=torch.uint8)))
        unrecorded = sum(entry["leftAt"] is None for entry in made.workers.values()) > len(held)
        if (made.step == 0 or (unrecorded and cut.clocks is not None)) and c.views.initial:
            held.append(("initial", torch.frombuffer(bytearray(c.views.initial), dtype=torch.uint8)))
        stem = f"v{c.views.view:06d}-c{cut.number:06d}"
        if held:
            made = replace(made, records=files.write_blocks(c.folder, f"{stem}-records.safetensors", held, {"run": c.place.run}))
        buffers = self._buffers(made)
        if buffers:
            made = replace(made, buffers=files.write_blocks(c.folder, f"{stem}-buffers.safetensors", buffers, {"run": c.place.run}))
        return made

    def _buffers(self, made: Manifest) -> list[tuple[str, torch.Tensor]]:
        """The model's buffers are rank 0's, from its record at the cut (its last one when it has left)."""
        records = self.c.members[0].records
        blob = records.get(int(made.workers["0"]["clock"])) or (records[max(records)] if records else self.c.views.initial)
        return sorted(record.unpack(blob).buffers.items()) if blob else []


def _left(tables: Mapping[str, Any], rank: int) -> int | None:
    """From which clock on a worker has left, if every shard knew so at the cut."""
    clocks = [table["left"].get(str(rank)) for table in tables.values()]
    return None if None in clocks else max(clocks)
