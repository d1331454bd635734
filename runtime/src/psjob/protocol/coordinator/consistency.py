"""Do the workers agree, in the weights that they hold and in the data that they read?

Weights: digests of what each holds are compared, and a difference has a likely cause. A digest is a row of sums, one for each tensor that
was looked at. Those of one moment are compared when every worker that is there has sent its own. So the odd one is known, and not only
that two differ. What most workers hold is taken for right.

Data: `ps.shard` gives each worker its part, so that data which are a part already would be cut twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psjob.protocol.messages import MOST

TRAINED, FROZEN, OTHER, BUFFER = "t", "f", "o", "b"
"""Kinds of a digest's tensors: the attached optimizer's, frozen parameters, those of an optimizer that was not attached, buffers."""
KINDS: Final = TRAINED + FROZEN + OTHER + BUFFER
BEGIN, WINDOWS, WHOLE, END = "begin", "windows", "whole", "end"
"""Looks: at frozen parameters before the first step, at windows, at all of a checkpoint, at all when the script has ended."""
LOOKS: Final = (BEGIN, WINDOWS, WHOLE, END)
MOMENTS = 4
"""So many moments that some workers have not told of are kept."""
VIEWS = 8
"""So many different digests of one moment are kept: all others are counted as odd."""
FIRST: Final = ("lr",)
"""Hyperparameters that are named before others."""
MOST_SUMS: Final = 4096
"""Sums of a digest."""
LONGEST_NAME: Final = 200
"""Characters of a tensor's name."""
MOST_NAME: Final = 80
"""Characters of a class's name."""


@dataclass(frozen=True)
class Digest:
    """What a worker holds after step `clock`, by one of LOOKS.

    `kinds` has a letter for each of `sums`. `names` are of all of them, or empty. `numbers` are the hyperparameters of each parameter group
    with which the step was made, here (`alone`) or on the shards. `machine` names the processor. `strangers`: optimizers that were not
    attached. `left_out`: steps for which the worker had no batch, so that the body of its loop did not run.
    """

    clock: int
    look: str
    kinds: str
    sums: tuple[int, ...]
    names: tuple[str, ...] = ()
    numbers: tuple[Mapping[str, float], ...] = ()
    machine: str = ""
    alone: bool = False
    strangers: tuple[str, ...] = ()
    left_out: int = 0

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Digest | None:
        """From a worker's DIGEST; None where it is not in shape: nothing is decided by it."""
        kinds, sums, names = body.get("kinds"), body.get("sums"), body.get("names", [])
        clock, numbers = body.get("clock"), body.get("numbers", [])
        if not (isinstance(kinds, str) and len(kinds) <= MOST_SUMS and not set(kinds) - set(KINDS)):
            return None
        if not (isinstance(sums, list) and len(sums) == len(kinds) and all(type(value) is int for value in sums)):
            return None
        if (look := body.get("look")) not in LOOKS:
            return None
        if not (isinstance(names, list) and len(names) in (0, len(kinds)) and type(clock) is int and 0 <= clock <= MOST):
            return None
        if not (isinstance(numbers, list) and all(isinstance(group, dict) for group in numbers)):
            return None
        groups = ({str(key)[:64]: value for key, value in group.items() if type(value) in (int, float, bool)} for group in numbers)
        strangers = body.get("strangers", [])
        return cls(
            clock, look, kinds, tuple(sums), tuple(_printable(name) for name in names), tuple(groups),
            _printable(body.get("machine", "")), body.get("alone") is True,
            tuple(_printable(name) for name in strangers[:8]) if isinstance(strangers, list) else (), _sum(body.get("leftOut")) or 0,
        )  # fmt: skip

    @property
    def moment(self) -> tuple[str, int]:
        """Digests of one moment are compared: between two looks at one step the script may have written weights."""
        return self.look, 0 if self.look == BEGIN else self.clock

    def same(self, other: Digest) -> bool:
        """Is nothing different that is compared?"""
        return (self.kinds, self.sums, self.numbers) == (other.kinds, other.sums, other.numbers)


@dataclass
class _Moment:
    views: list[tuple[Digest, list[int]]] = field(default_factory=list)
    """Different digests, and who sent each."""
    came: set[int] = field(default_factory=set)

    def add(self, rank: int, digest: Digest) -> None:
        for _, ranks in self.views:
            if rank in ranks:
                ranks.remove(rank)
        self.views = [view for view in self.views if view[1]]
        self.came.add(rank)
        for seen, ranks in self.views:
            if seen.same(digest):
                ranks.append(rank)
                return
        if len(self.views) < VIEWS:
            self.views.append((digest, [rank]))


class Drift:
    """What the job knows of differences between its workers. Sentences stay: a later step may hide what an earlier one showed."""

    def __init__(self) -> None:
        self.weights: str | None = None
        """What says that weights differ which should be equal."""
        self.buffers: str | None = None
        """What says that each worker has buffers of its own."""
        self._moments: dict[tuple[str, int], _Moment] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        """By kinds, the names of a whole digest's tensors."""

    def came(self, rank: int, digest: Digest, alive: int) -> list[str]:
        """A worker's digest; what is new, in sentences. `alive`: how many workers have not left."""
        if digest.names and digest.look != WINDOWS:
            self._names.pop(digest.kinds, None)
            self._names[digest.kinds] = digest.names
            if len(self._names) > VIEWS:  # stages have different tensors
                del self._names[next(iter(self._names))]
        moment = self._moments.setdefault(digest.moment, _Moment())
        moment.add(rank, digest)
        found = self.settled(alive)
        for key in [key for key in self._moments if key[0] != BEGIN][:-MOMENTS]:
            found += self._judge(self._moments.pop(key))
        return found

    def settled(self, alive: int) -> list[str]:
        """Judge the moments of which all have told that have not left; what is new, in sentences."""
        found = []
        for moment in self._moments.values():
            if len(moment.came) >= alive:
                found += self._judge(moment)
        return found

    def rewound(self) -> None:
        """Steps are undone, and are made again."""
        self._moments = {key: moment for key, moment in self._moments.items() if key[0] == BEGIN}

    def _judge(self, moment: _Moment) -> list[str]:
        if len(moment.views) < 2:
            return []
        found = []
        most = max(moment.views, key=lambda view: (len(view[1]), -min(view[1])))
        for digest, ranks in sorted((view for view in moment.views if view is not most), key=lambda view: min(view[1])):
            other = min(ranks), min(most[1])
            if self.weights is None and (said := self._weights(digest, most[0], other)) is not None:
                self.weights = said
                found.append(said)
            if self.buffers is None and (said := self._buffers(digest, most[0], other)) is not None:
                self.buffers = said
                found.append(said)
        return found

    def _weights(self, odd: Digest, usual: Digest, ranks: tuple[int, int]) -> str | None:
        rows = _differing(odd, usual, TRAINED + FROZEN + OTHER)
        numbers = _numbers(odd, usual, ranks)
        when = "at the beginning" if odd.look == BEGIN else f"after step {odd.clock}"
        mine, theirs = odd.kinds.count(FROZEN), usual.kinds.count(FROZEN)
        if mine != theirs and not (odd.strangers or usual.strangers):
            return f"worker {ranks[0]} has {mine} frozen parameters {when} and worker {ranks[1]} has {theirs}; all must build one model"
        if not rows:
            how = "workers come apart" if odd.alone else "workers ask the shards for different steps"
            return None if numbers is None else f"{how} {when}: {numbers}"
        name = self._named(odd, usual, rows[0])
        more = f" and {len(rows) - 1} more" if rows[1:] else ""
        cause = (numbers if odd.alone else None) or _cause(odd, usual, odd.kinds[rows[0]], ranks)
        return f"weights differ {when}: {name}{more} of worker {ranks[0]} is not that of worker {ranks[1]}; {cause}"

    def _buffers(self, odd: Digest, usual: Digest, ranks: tuple[int, int]) -> str | None:
        rows = _differing(odd, usual, BUFFER)
        if not rows:
            return None
        named = ", ".join(self._named(odd, usual, row) for row in rows[:3])
        more = f" and {len(rows) - 3} more" if rows[3:] else ""
        when = "at the beginning" if odd.look == BEGIN else f"after step {odd.clock}"
        return (
            f"buffers differ {when}: {named}{more} of worker {ranks[0]} and of worker {ranks[1]}. Each worker keeps its own, and the job's "
            "are those of worker 0"
        )

    def _named(self, odd: Digest, usual: Digest, row: int) -> str:
        names = odd.names or usual.names or self._names.get(odd.kinds, ())
        kind = {TRAINED: "parameter", FROZEN: "frozen parameter", OTHER: "parameter", BUFFER: "buffer"}[odd.kinds[row]]
        return f"{kind} {names[row]}" if row < len(names) else f"{kind} number {row}"


def _differing(one: Digest, other: Digest, kinds: str) -> list[int]:
    """Rows of these kinds that differ. Of digests of other tensors, those that both have are compared, in their order."""
    if one.kinds == other.kinds:
        return [row for row, kind in enumerate(one.kinds) if kind in kinds and one.sums[row] != other.sums[row]]
    found = []
    for kind in kinds:
        mine, theirs = ([row for row, at in enumerate(digest.kinds) if at == kind] for digest in (one, other))
        if len(mine) == len(theirs):
            found += [row for row, its in zip(mine, theirs, strict=True) if one.sums[row] != other.sums[its]]
    return sorted(found)


def _numbers(odd: Digest, usual: Digest, ranks: tuple[int, int]) -> str | None:
    """The first hyperparameter that differs, in words."""
    several = len(odd.numbers) > 1
    for group, (mine, theirs) in enumerate(zip(odd.numbers, usual.numbers, strict=False)):
        for name in sorted(mine.keys() & theirs.keys(), key=lambda name: (name not in FIRST, name)):
            if mine[name] != theirs[name]:
                where = f" of parameter group {group}" if several else ""
                what = f"{'learning rate' if name == 'lr' else name}{where}"
                values = f"{mine[name]:.9g} on worker {ranks[0]} and {theirs[name]:.9g} on worker {ranks[1]}"
                return f"{what} is {values}. {_help(odd, usual, ranks)}"
    return None


def _help(odd: Digest, usual: Digest, ranks: tuple[int, int]) -> str:
    """What is likely to help where hyperparameters differ."""
    if odd.left_out != usual.left_out:
        rank, steps = (ranks[0], odd.left_out) if odd.left_out > usual.left_out else (ranks[1], usual.left_out)
        return (
            f"The loop of worker {rank} did not run for {steps} steps, since it had no batch, and its scheduler was not stepped. Give the "
            "loader drop_last=True and all workers as many batches, or step the scheduler once an epoch"
        )
    return "Let all decide it by the same number, such as the loss on validation data that each reads whole"


def _cause(odd: Digest, usual: Digest, kind: str, ranks: tuple[int, int]) -> str:
    """Why a tensor of this kind is likely to differ, and what helps."""
    strangers: Sequence[str] = odd.strangers or usual.strangers
    if kind == OTHER or (strangers and kind == FROZEN):
        return f"an optimizer that was not attached steps it{f' ({strangers[0]})' if strangers else ''}"
    if kind == FROZEN:
        if odd.look == BEGIN:
            return "it was built otherwise: seed before the model is built, or load the same file in all workers"
        return "the script writes it, or built it otherwise: seed before the model is built, and write the same in all workers"
    if odd.alone and odd.machine != usual.machine:
        return f"their processors may round otherwise ({usual.machine or 'unknown'}, {odd.machine or 'unknown'}); take updateAt: shard"
    if odd.alone:
        return (
            "the script of one of them has written weights or optimizer state by hand, or its optimizer uses random numbers or a curvature "
            "of its own batches"
        )
    return "the script of one of them has written weights by hand"


MOST_PASSES: Final = 64
"""Passes whose reports are kept."""

REMEDY: Final = (
    "psjob.shard gives each worker its part, and data that are a part by rank already would be cut twice. Give it all of the data, made "
    "with one seed. Or loop over the loader without psjob.shard"
)


@dataclass(frozen=True)
class Told:
    """What a worker tells of the data of one pass that it trains on, as it begins. None: it is not known, or not the same twice."""

    site: int
    """Where in the script the pass is: a checksum."""
    number: int
    loader: str
    """Names of classes."""
    data: str
    length: int | None
    """Samples; None: a stream."""
    batch: int | None
    """Samples of a batch."""
    processes: int | None
    """That read a stream."""
    content: int | None
    """Checksums: of what samples are made of, of some samples,"""
    samples: int | None
    traits: int | None
    """of numbers and texts that the data keep,"""
    first: int | None
    """and of the order of samples, or of what was read first, where it is not `ordered`."""
    ordered: bool = True

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Told | None:
        """From an INPUTS, of data that are given to `ps.shard`; None where it says nothing of such, or not in shape."""
        told = body.get("data")
        if not isinstance(told, dict) or (site := _sum(told.get("site"))) is None or (number := _sum(told.get("number"))) is None:
            return None
        loader, kind = ("".join(filter(str.isprintable, str(told.get(name))))[:MOST_NAME] for name in ("loader", "data"))
        length, batch, processes, content, samples, traits, first = (
            _sum(told.get(name)) for name in ("length", "batch", "processes", "content", "samples", "traits", "first")
        )
        return cls(site, number, loader, kind, length, batch, processes, content, samples, traits, first, told.get("ordered") is True)


@dataclass(frozen=True)
class Difference:
    """Between two workers. `sure`: samples are lost, or trained twice."""

    sentence: str
    sure: bool


class Alike:
    """The first report of each pass, by the worker of lowest rank so far."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], tuple[int, Told]] = {}

    def see(self, rank: int, told: Told) -> Difference | None:
        """What worker `rank` tells. How it differs from what another has told of the same pass, if it does."""
        key = told.site, told.number
        known = self._told.get(key)
        if known is None or rank <= known[0]:
            self._told[key] = rank, told
            for old in list(self._told)[:-MOST_PASSES]:
                del self._told[old]
        if known is None or known[0] == rank:
            return None
        return data_difference(*sorted([known, (rank, told)], key=lambda each: each[0]))


def data_difference(one: tuple[int, Told], other: tuple[int, Told]) -> Difference | None:
    """What two workers, a rank and its data each, read otherwise."""
    (lower, a), (higher, b) = one, other
    who = f"worker {higher}"
    if a.batch != b.batch and a.batch is not None and b.batch is not None:
        return Difference(
            f"{who} takes batches of {b.batch} samples, worker {lower} of {a.batch}. psjob.shard deals out batches by their number: "
            "samples would be trained twice or never. Take one batch size on all workers",
            True,
        )
    if a.processes != b.processes and a.processes is not None and b.processes is not None:
        return Difference(
            f"{who} reads {b.data} by num_workers={b.processes}, worker {lower} by {a.processes}. The batches of a stream are counted in "
            "each process that reads it. Take one num_workers on all workers",
            True,
        )
    if (a.loader, a.data) != (b.loader, b.data):
        return Difference(f"{who} reads {b.data} by {b.loader}, worker {lower} {a.data} by {a.loader}. {REMEDY}", True)
    if a.length != b.length:
        return Difference(f"{who} has {b.length} samples of {b.data}, worker {lower} {a.length}. {REMEDY}", True)
    if _differ(a.content, b.content) or _differ(a.samples, b.samples):
        return Difference(f"the {b.length} samples of {b.data} are not the same on {who} as on worker {lower}. {REMEDY}", True)
    if not _differ(a.first, b.first):
        return None
    if a.ordered and b.ordered:
        return Difference(
            f"{who} draws another order of {b.data} than worker {lower}: samples would be trained twice or never. Seed what its sampler "
            "draws from alike on all workers",
            True,
        )
    if a.length is not None:
        return Difference(
            f"{who} draws other samples of {b.data} than worker {lower}, as by weights of its own. Each worker takes its part of its own "
            "draw. Give the samplers of all workers the same weights and seeds",
            False,
        )
    if _differ(a.traits, b.traits):
        return Difference(f"{who} reads other samples from {b.data} than worker {lower}, and keeps other numbers in it. {REMEDY}", True)
    return Difference(
        f"{who} reads other samples from {b.data} than worker {lower}: it slices by rank by itself, or draws without a seed. {REMEDY}",
        False,
    )


def _differ(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other


def _printable(value: Any) -> str:
    return "".join(filter(str.isprintable, str(value)[:LONGEST_NAME]))


def _sum(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MOST else None
