"""What a worker says to a shard, field by field, and how far it is believed. docs/security.md has this list as a table.

Of a body a shard reads the fields of this list, and no other: `known` takes the rest away. So a new field has to be put in a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from psjob.wire.frame import Kind

ANY: Final = "*"
"""Names that the script chooses."""


class Belief(Enum):
    """How far a field is believed."""

    CHECKED = "checked"
    """It must be what the job's config, the stream's key or the run's state already says."""
    BOUNDED = "bounded"
    """Any value within what these allow."""
    OWN = "own word"
    """Nobody else knows it."""


@dataclass(frozen=True)
class Field:
    """`frame`: the type of a frame, or what else carries it. `what`: by what it is checked or bounded, or what it can do."""

    frame: str
    name: str
    belief: Belief
    what: str


def _fields(frame: str, belief: Belief, rows: Mapping[str, str]) -> tuple[Field, ...]:
    return tuple(Field(frame, name, belief, what) for name, what in rows.items())


HEADER: Final = (
    *_fields("header", Belief.CHECKED, {
        "kind": "one of the types of frames that a worker sends, else the stream ends",
        "run": "the run of the shard",
        "worker": "the rank whose key has proven the stream",
        "start": "the start that this key is of",
        "rewinds": "that of the stream's hello; a lower one than the rank had is refused",
        "term": "the shard's term, where all workers rewind together; elsewhere it is not read",
        "table": "a table of the job",
        "block": "a block of the shard, which the worker's stage uses",
        "codec": "one that the manifest allows and the hello offered",
        "length": "the size of the block, of whole rows, or the limit of the body",
        "crc": "the sum of what came",
    }),
    *_fields("header", Belief.BOUNDED, {
        "clock": "the first step that is not complete; of records at most 64 steps ahead of the pushes",
        "info": "hyperparameters that this worker has sent; a shard keeps the last four",
        "part": "the block's place in lent memory, or an end of the record that is kept",
        "version": "of a push at most the block's version; of a pull at most 64 steps ahead; of weights at most the block's step",
    }),
    *_fields("header", Belief.OWN, {
        "attempt": "nothing: it is not read",
        "request": "the answer has it; of a record, how long the script has waited, which people see",
        "generation": "of a record, of how much time it tells, which people see",
        "flags": "ABSENT: the worker has no part in a step, whose mean is that of the others. SKIP: no update is made of a step "
        "(a robust reduction leaves the push out)",
    }),
)  # fmt: skip
HELLO: Final = (
    *_fields("HELLO", Belief.CHECKED, {
        "role": "the role whose key has proven the stream",
        "mode": "the mode of the job; with another one the worker begins again",
        "lane": "the session has its token, and no more lanes than WELCOME offers",
        "token": "the random one that WELCOME has told",
        "asks": "one of two questions to shard 0: stage cuts, or a meeting of workers",
        "codecs": "those that the manifest names are used, and no others",
        "push": "the manifest's codec, or with `auto` one of its ladder",
        "pull": "as `push`",
        "table": "the table of rank 0, field by field; rank 0's is the job's",
        "tables": "as `table`",
        "rule": "that of rank 0; `training.updateRule`, `updateAt: shard` and mode local say which it is",
        "aliases": "as `table`",
        "layout": "the digest of the run's blocks; with another one the worker gets these",
    }),
    *_fields("HELLO", Belief.BOUNDED, {
        "acked": "no more steps than the shard can have acknowledged",
        "slots": "1 to 64",
        "cores": "0 to 65536; of more it is offered as many streams as the shard has cores for",
        "transports": "shared memory is lent on one host only, in the manifest's scope",
        "rowTransports": "as `transports`",
        "has": "a place in the record that shard 0 sends back",
        "port": "1 to 65535, in a job of stages; the host is the stream's",
        "point": "200 characters; a worker has 4096 open points at most",
        "said": "a worker has 64 MiB at open points at most",
        "cuts": "worker 0's, one for each stage after the first, the first time only",
        "seconds": "a number from 0 beside the cuts, for the log",
    }),
    *_fields("HELLO", Belief.OWN, {
        "fresh": "the process has no place yet. In sync a worker that has no record of the open step can so send all back to the "
        "last checkpoint",
        "term": "a higher one lets this worker wait; in sync a lower one lets it begin again",
        "restore_id": "as `term`",
        "attempt": "whether the shard counts what it lost of this worker",
        "init": "rank 0 waits for the word to give first values",
        "waits": "whether this stream waits 5 s for the others",
        "first": "whether it is answered when rank 0 is there",
    }),
)  # fmt: skip
TABLE: Final = (
    *_fields("a row of `table`", Belief.CHECKED, {
        "name": "up to its limit of characters, once in the table",
        "shape": "up to the limits of a tensor; rank 0's size is the memory that the shards take",
        "dtype": "one that blocks can have",
        "group": "a group of parameters from 0",
        "stages": "stages of the manifest",
    }),
    *_fields("a row of `tables`", Belief.CHECKED, {
        "name": "once in the list",
        "dim": "the limits of a table",
        "rule": "a rule for rows, by name",
        "num_rows": "the limits of a table; ids lie below it",
        "dtype": "float32 or int32",
        "init": "a way to begin rows, by name",
        "scale": "a finite number from 0; rank 0's",
        "seed": "a whole number; rank 0's draws the first values of rows",
        "admit_after": "1 to 255; rank 0's",
        "evict_after": "a whole number from 1; rank 0's",
    }),
)  # fmt: skip
INFO: Final = (
    *_fields("INFO", Belief.BOUNDED, {
        "clip": "`training.sync.maxGradNorm` where it is smaller",
        "clamp": "a finite number above 0; the norm of the manifest holds beside it",
        "processes": "`workers.processes` at most",
        "none": "as many as the model has tensors; a tensor is left out if all workers say so",
    }),
    *_fields("INFO", Belief.OWN, {
        "hyperparameters": "finite, whole and known to the rule. In async a push is applied with them; in sync those of the lowest rank "
        "hold. `ruleOptions` and those of mode local are the manifest's, whatever the worker says",
        "rows": "the same of tables",
        "nonFinite": "which tensor is named as the one with NaN; a shard looks at the bytes itself",
    }),
)  # fmt: skip
SAID: Final = (
    *_fields("REPORT", Belief.OWN, {
        ANY: "256 numbers that people see; rank 0's hold. A `loss` that is not finite says that the job has diverged; `total` is "
        "the end of the bar",
    }),
    *_fields("HEARTBEAT", Belief.OWN, {"passes": "a count that people see"}),
    *_fields("CODEC", Belief.CHECKED, {"pull": "a codec that was agreed on"}),
    *_fields("STEP_LOST", Belief.CHECKED, {"rank": "a worker of a job of stages"}),
    *_fields("STEP_LOST", Belief.OWN, {"step": "that a neighbour's work of a step is lost: all go back to the last checkpoint"}),
    *_fields("MEASURED", Belief.OWN, dict.fromkeys(
        ("idle", "rss", "peak", "devicePeak", "waits", "for", "seconds", "delay"), "a number or a word that people see of a job of stages"
    )),
    *_fields("MEASURED", Belief.OWN, dict.fromkeys(("parts", "steps"), "seconds and a count that people see")),
    *_fields("INPUTS", Belief.OWN, {
        "inputs": "64 sums of what its first steps were made of; equal ones of two workers are reported",
        "data": "sums of its data; a worker whose data differ from those that came first is refused, which ends the job",
        **dict.fromkeys(
            ("data.site", "data.number", "data.loader", "data.data", "data.length", "data.batch", "data.processes", "data.content",
             "data.samples", "data.traits", "data.first", "data.ordered"), "as `data`"
        ),
    }),
    *_fields("DIGEST", Belief.OWN, {
        "clock": "the step of its sums",
        "sums": "4096 sums of its weights; those of a majority hold, and who differs is reported. Nothing is decided by them",
        **dict.fromkeys(("look", "kinds", "names", "numbers", "machine", "alone", "strangers", "leftOut"), "as `sums`"),
    }),
)  # fmt: skip
RECORD: Final = (
    *_fields("a resume record", Belief.OWN, {
        "buffers": "tensors by name. Those of the lowest rank that has a record are the checkpoint's buffers",
        "unsaved": "names of buffers that a checkpoint leaves out",
        ANY: "bytes that shard 0 keeps and gives back to this worker, 256 MiB at most. Nobody else reads them",
    }),
)  # fmt: skip
BYTES: Final = (
    *_fields("PUSH, EARLY, ROW_PUSH", Belief.OWN, {
        "payload": "a gradient. `training.sync.maxGradNorm`, `maxPushNorm`, `nonFinite` and `reduction` bound it on the shard, by bytes "
        "that the worker cannot change any more",
    }),
    *_fields("PUSH with STORE", Belief.OWN, {"payload": "weights of a job whose workers step; they are what a checkpoint holds"}),
    *_fields("INIT, ROW_INIT", Belief.OWN, {"payload": "first values, of rank 0 before the first step only"}),
    *_fields("LOOKUP, ROW_IDS, ROW_PUSH", Belief.CHECKED, {"ids": "ascending, without a repeat, in the table's range"}),
    *_fields("PULL, STATE, MARK, LEAVE, CHECKPOINT, STOP", Belief.OWN, {
        "no payload": "a worker asks for a block or its state, for a checkpoint (one at a time), or ends: from its own step on it has no "
        "part in the job",
    }),
)  # fmt: skip
FIELDS: Final = (*HEADER, *HELLO, *TABLE, *INFO, *SAID, *RECORD, *BYTES)
NAMES: Final = {frame: frozenset(field.name for field in FIELDS if field.frame == frame) for frame in {field.frame for field in FIELDS}}
"""By frame, the names of its fields."""


def known(kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
    """What of a worker's body is in the list. A later version may say more, which this one does not read."""
    names = NAMES.get(kind.name, frozenset())
    return dict(body) if ANY in names else {name: body[name] for name in body.keys() & names}
