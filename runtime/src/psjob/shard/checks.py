"""Checks of a push and of its hyperparameters, made before anything of them counts.

The name of a worker's rule, and hyperparameters that are the manifest's, a shard knows by its own config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from psjob import rules
from psjob.contract import MOST_NUMBER
from psjob.process.config import Config
from psjob.rules.base import Hyperparameters, check_hyperparameters
from psjob.rules.optimizers import OUTER, of_manifest
from psjob.shard.block import ParameterBlock
from psjob.shard.pending import MOST_PENDING, PushMetadata
from psjob.shard.store import Store
from psjob.shard.table import ServedTable
from psjob.wire.frame import MAX_JSON, MAX_VALUES, Flag, Header, Kind, WireError

MOST_AHEAD = 64
"""Clocks that a worker may be ahead of its pushes to shard 0. One or two are usual: records and pushes come by different lanes."""
SPARE_GROUPS = 64
"""Parameter groups without a tensor that an optimizer may have after those with one."""
GROUP_BYTES, INDEX_BYTES = 1024, 16
"""Of an INFO, most that a group's or a table's hyperparameters take, and the number of a tensor."""
GROUP_VALUES = 64
SHORT = (16 << 10, 256)
MOST_SAID = {
    Kind.REPORT: (128 << 10, 1024), Kind.INPUTS: (64 << 10, 1024), Kind.DIGEST: (4 << 20, 1 << 15),
    Kind.CHECKPOINT: SHORT, Kind.STOP: SHORT, Kind.HEARTBEAT: SHORT, Kind.STEP_LOST: SHORT, Kind.MEASURED: SHORT, Kind.CODEC: SHORT,
}  # fmt: skip
"""Bytes and values of what a worker says, some times what it can have to say: while JSON is read, no other thread of a shard continues."""
REACHED = frozenset({Kind.RECORD, Kind.RECORD_DELTA, Kind.RECORD_PIECE, Kind.MARK})
"""Frames whose clock is one that their worker has come to."""


def check_push(store: Store, header: Header, cell: ParameterBlock, encoded: bool = False) -> None:
    """Refuse a push whose size or clock cannot be right, before anything of it is read; one that is `encoded` has its size checked."""
    if cell.group is not None and header.worker not in cell.group:
        raise WireError(f"{header.kind.name} of block {header.block} by worker {header.worker}, whose stage of the model does not use it")
    expected = 0 if header.flags & (Flag.ABSENT | Flag.SKIP | Flag.HELD) else cell.block.nbytes
    if header.length != expected and not encoded:
        raise WireError(
            f"{header.kind.name} of block {header.block} has {header.length} bytes, expected {expected} "
            f"({cell.block.length} elements of {cell.block.dtype})"
        )
    check_ahead(store, header, cell)
    if header.flags & Flag.STORE:
        _check_store(header, cell)
    if header.flags & (Flag.ABSENT | Flag.STORE) or header.kind is Kind.EARLY:
        return
    check_info(store, header, cell.name)


def check_ahead(store: Store, header: Header, cell: ParameterBlock | ServedTable) -> None:
    """Refuse a push that its worker makes before others' are here that it has to wait for.

    In sync an update is made of all that came: it would count twice in one update, and be missed in the next. Elsewhere each push that
    waits holds the memory of a gradient.
    """
    if header.kind is Kind.EARLY or header.flags & Flag.STORE:
        return
    rank = header.worker
    if store.in_step and header.clock > cell.n:
        raise WireError(f"worker {rank} pushes step {header.clock} of {cell.name}, which waits for pushes of step {cell.n}")
    if cell.pending.of(rank) > MOST_PENDING:
        raise WireError(f"{cell.pending.of(rank)} pushes of {cell.name} by worker {rank} wait already")


def _check_store(header: Header, cell: ParameterBlock) -> None:
    """Workers give weights where they step by themselves, and of steps that the block has come to. Elsewhere a shard makes all updates."""
    if header.kind is not Kind.PUSH or cell.update is None:
        raise WireError(f"worker {header.worker} gives weights of {cell.name}, which this job's shards make")
    if not 0 <= header.version[1] <= cell.n:
        raise WireError(f"worker {header.worker} gives weights of {cell.name} at step {header.version[1]}; the block is at step {cell.n}")


def check_leave(store: Store, header: Header) -> None:
    """Refuse a LEAVE of another clock than its worker has come to here: it would be waited for, or missed, at the wrong step."""
    complete = store.complete(header.worker)
    if header.clock < 0 or (store.admission.rows[header.worker].owned and header.clock != complete):
        raise WireError(f"worker {header.worker} leaves at step {header.clock}; this shard has {complete} complete steps of it")


def check_reached(store: Store, header: Header) -> None:
    """Refuse a clock that its worker cannot have come to: a record of it would hide all that follow."""
    complete = store.complete(header.worker)
    if store.admission.rows[header.worker].owned and header.clock > complete + MOST_AHEAD:
        raise WireError(
            f"worker {header.worker} names step {header.clock}; this shard has {complete} complete steps of it, "
            f"and it can be {MOST_AHEAD} ahead of them at most"
        )


def check_pull(store: Store, header: Header, cell: ParameterBlock) -> None:
    """Refuse to wait for a step that the worker cannot come to soon: it would hold a place, and be looked at, until the run ends."""
    row, wanted = store.admission.rows[header.worker], header.version[1]
    most = max(cell.n, row.complete + MOST_AHEAD)
    if header.flags & Flag.BEFORE and not cell.keeps_before:
        raise WireError(f"worker {header.worker} asks for {cell.name} of one update ago, which is kept only in sync with training.delay")
    if row.owned and wanted > most:
        raise WireError(f"worker {header.worker} asks for {cell.name} at step {wanted}; it can come to {most} at most")


def check_acked(store: Store, rank: int, acked: int) -> None:
    """Refuse a hello by which more of a worker's clocks were acknowledged than can have been: those after would count as taken."""
    complete = store.complete(rank)
    most = complete if store.attempt == 1 or store.mode.rewinds_together else store.most.get(rank, acked)
    most = min(max(complete, most), MOST_NUMBER)
    if acked > most:
        raise WireError(f"worker {rank} says that {acked} of its steps were acknowledged here; it can have been {most} at most")


def check_info(store: Store, header: Header, name: str) -> PushMetadata:
    """The hyperparameters that a push names. Raises WireError if they are not known, or are none."""
    info = store.infos.of(header)
    if info is None:
        raise WireError(f"push of {name} names hyperparameters {header.info}, which were not sent")
    without = not info.hyperparameters and store.rule_name != "reduce" if header.kind is Kind.PUSH else not info.rows
    if without and not header.flags & Flag.SKIP:
        raise WireError(f"push of {name} names hyperparameters {header.info}, which are an absent rank's: none")
    return info


def most_info(store: Store) -> int:
    """Bytes of an INFO at most: one frame, or what the job's groups, tables and tensors need."""
    tensors = 0 if store.layout is None else len(store.layout.table)
    return max(MAX_JSON, GROUP_BYTES * (_groups(store) + SPARE_GROUPS + len(store.row_cells)) + INDEX_BYTES * tensors)


def most_info_values(store: Store) -> int:
    """As `most_info`, of its values."""
    if store.layout is None:
        return MAX_VALUES
    return GROUP_VALUES * (_groups(store) + SPARE_GROUPS + len(store.row_cells)) + len(store.layout.table)


def info_of(store: Store, rank: int, body: Mapping[str, Any]) -> PushMetadata:
    """What an INFO says. Raises WireError if it is not in shape, or says more than the job has."""
    try:
        hyperparameters = group_hyperparameters(store, body["hyperparameters"])
        rows = table_hyperparameters(store, body.get("rows", []))
        bad = None if body.get("nonFinite") is None else int(body["nonFinite"])
        if store.layout is not None and len(body["none"]) > len(store.layout.table):
            raise ValueError(f"{len(body['none'])} tensors have no gradient, the model has {len(store.layout.table)}")
        none = frozenset(int(t) for t in body["none"])
        clip, clamp = clip_limit(store, body.get("clip")), clip_limit(store, body.get("clamp"))
        processes = int(body.get("processes", 1))
        if not 1 <= processes <= store.processes:
            raise ValueError(f"a push of {processes} processes, and a worker of this job has {store.processes} at most")
        return PushMetadata(hyperparameters, none, rows, clip, clamp, bad, processes)
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"INFO of worker {rank} is not in shape: {error!r}") from None


def _groups(store: Store) -> int:
    """Parameter groups that have a tensor, and those before them."""
    return 0 if store.layout is None else 1 + max((t.group for t in store.layout.table), default=-1)


def group_hyperparameters(store: Store, groups: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Hyperparameters of every group, whole and finite. Raises ValueError naming what is wrong (an absent rank has none)."""
    wanted = 0 if store.rule_name == "reduce" else _groups(store)
    if 0 < len(groups) < wanted:  # the last groups may have no parameter
        raise ValueError(f"hyperparameters of {len(groups)} parameter groups, the model has {wanted}")
    if store.layout is not None and len(groups) > _groups(store) + SPARE_GROUPS:
        raise ValueError(f"hyperparameters of {len(groups)} parameter groups, the model has {_groups(store)}")
    own = store.own(store.rule_name)
    return tuple(check_hyperparameters(rules.named(store.rule_name), {**group, **own}) for group in groups)


def clip_limit(store: Store, limit: Any) -> float | None:
    """The largest norm, or element, of the mean gradient. Raises ValueError if it is none, or this mode has no mean of all blocks."""
    if limit is None:
        return None
    if not store.clips:
        raise ValueError(f"gradients are to be clipped to {str(limit)[:40]}, which this job has no mean for")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise ValueError(f"gradients are to be clipped to {str(limit)[:40]}, expected a finite number above 0")
    return float(limit)


def table_hyperparameters(store: Store, tables: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Hyperparameters of every table, whole and finite. Raises ValueError naming what is wrong (an absent rank has none)."""
    if tables and len(tables) != len(store.row_cells):
        raise ValueError(f"hyperparameters of {len(tables)} tables, the job has {len(store.row_cells)}")
    return tuple(
        check_hyperparameters(cell.table.rule, hyperparameters)
        for cell, hyperparameters in zip(store.row_cells.values(), tables, strict=False)
    )


def rule_problem(config: Config, rank: int, rule: str) -> str | None:
    """If the manifest says which rule a worker's hello must name, and it names another, a sentence."""
    wanted = _wanted(config)
    if wanted is not None and rule != wanted:
        return f"worker {rank}'s updates are of rule {rule[:40]}, and the manifest says {wanted}; run one version of psjob in all pods"
    if config.update_at == "shard" and rule == "reduce":
        return f"worker {rank} steps by itself, and the manifest says training.updateAt: shard; run one version of psjob in all pods"
    return None


def own_hyperparameters(config: Config, rule: str) -> Hyperparameters:
    """Those that a push of this rule has from the manifest, whatever its worker says."""
    if rule != _wanted(config):
        return {}
    outer = {"lr": config.local.lr, "momentum": config.local.momentum} if config.mode == "local" else {}
    try:
        return outer if config.update_rule is None else {**outer, **of_manifest(rule, config.workers, config.rule_options)}
    except ValueError:
        return outer  # every worker refuses to begin with these


def _wanted(config: Config) -> str | None:
    """The rule that the manifest says; None where it is the script's optimizer's."""
    return config.update_rule or (OUTER if config.mode == "local" else None)
