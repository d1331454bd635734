"""`shard`: this worker's slice of a DataLoader, at the same place again after a restart.

`epochs` and `state`: a loop that continues in the middle after a restart, and what it carries from pass to pass.
"""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch.utils import data as torch_data

from psjob.api import advice, sample_order, script_code
from psjob.api import attach as attaching
from psjob.api.data_cursor import AFTER, Place
from psjob.api.reporting import worker_place
from psjob.api.slices import SampleStream, Slices, Yielded, has_its_own, rounds_of
from psjob.api.training_job import TrainingJob
from psjob.api.values import ScriptState, the_state
from psjob.embeddings.lookup import Ahead
from psjob.process.errors import Refused, refuse
from psjob.process.startup import integration_of, integrations_in_use
from psjob.resume.record import generator_states, put_generators

B = TypeVar("B", covariant=True)
Source: TypeAlias = Slices | SampleStream | Yielded
"""What a pass goes over: a loader that was taken apart, or one that is asked as it is."""


def shard(loader: Iterable[B], prefetch: Callable[[Any], Any] | None = None) -> ShardedLoader[B]:
    """Give a loader of this worker's batches of `loader`; outside a job, of all of them, as they are.

    Each pass over it is the next epoch, whether `shard` is called once or once an epoch. When a script was started again, finished passes
    give nothing, and the pass under way continues where it was, as does an `enumerate` over it. The batch size is per worker. All workers
    make the same number of steps an epoch. If the last round has too few batches, a worker is given a batch again in training. That
    step counts for nothing.

    Args:
        loader: a torch DataLoader, or what Accelerate's `prepare` made of one. A random order is drawn from (training.seed, epoch). Batches
            go to the workers in turn. A `DistributedSampler` that is left in counts as a sampler of all of the data. An IterableDataset is
            read whole by every worker, and so is a subclass with an `__iter__` of its own. All workers have the same data. In a job of
            stages every worker is given every batch.
        prefetch: a function from a batch to pairs (module, ids). If the model has `ps.Embedding`s, one batch is read ahead, so that its
            rows come while the batch before it is trained. Without the function the ids of a module are found where they are a tensor of
            the batch, or a view of one. Random numbers for a batch that is read ahead come from (seed, epoch, batch).

    Returns:
        What `loader` is to a loop: `len`, passes, and its attributes.

    Raises:
        Refused: for what is no DataLoader, for an order that could not be found again, and later for data that are not those of other
            workers. In a job this process ends with status 77 and the sentence.

    Example:
        >>> import torch, psjob as ps
        >>> loader = ps.shard(torch.utils.data.DataLoader(torch.arange(6), batch_size=2))
        >>> len(loader), [batch.tolist() for batch in loader]
        (3, [[0, 1], [2, 3], [4, 5]])
    """
    __tracebackhide__ = True
    job, made_at = attaching.current, script_code.call_site(sys._getframe(1))
    place = worker_place() if job is None else job.place  # known before `attach` too
    seed, rank, world = (0, 0, 1) if place is None else (place.config.seed, place.rank, place.world)
    if place is not None and place.config.stages:  # all workers work on each batch
        rank, world = 0, 1
    try:
        knows = integration_of(loader)
        if knows is None:
            return ShardedLoader(loader, _source(loader, seed, rank, world), world, prefetch, made_at=made_at)
        plain = loader if place is None and isinstance(loader, torch_data.DataLoader) else knows.plain(loader)
        return ShardedLoader(loader, _source(plain, seed, rank, world), world, prefetch, knows.hand(loader), plain)
    except Refused as refused:
        if job is not None:
            job.refuse(str(refused))
        refuse(str(refused))


def _described(loader: Any) -> str:
    """What of a loader stays the same from start to start, and may tell it from others of the script."""
    data: Any = getattr(loader, "dataset", None)
    try:
        size = len(data)
    except Exception:  # a stream, or a class that raises what it likes
        size = -1
    return f"{type(data).__name__} {size} {getattr(loader, 'batch_size', None)}"


_begun = 0
"""Passes begun outside a job."""


def epoch() -> int:
    """Number of the pass that `shard` is in.

    Returns:
        From 0: passes finished or begun, minus one; 0 before the first.

    Example:
        >>> import torch, psjob as ps
        >>> loader = ps.shard(torch.utils.data.DataLoader(torch.arange(4), batch_size=2))
        >>> seen = [ps.epoch() for _ in range(2) for batch in loader]
        >>> [number - seen[0] for number in seen]
        [0, 0, 1, 1]
    """
    job = attaching.current
    return max(0, (_begun if job is None else job.places.begun) - 1)


class ShardedLoader(Generic[B]):
    """A worker's slice of a loader; made by `psjob.shard`. What it has no word for is the wrapped loader's."""

    def __init__(
        self,
        loader: Any,
        source: Source,
        world: int,
        prefetch: Callable[[Any], Any] | None,
        hand: Callable[[Any], Any] = lambda batch: batch,
        plain: Any = None,
        made_at: str = "",
    ) -> None:
        self.loader = loader
        self._whole = loader if plain is None else plain
        """Of all batches of all workers; `loader` may say another length."""
        self._source, self._world, self._prefetch, self._hand = source, world, prefetch, hand
        self._over, self._made_at = _described(loader), made_at
        self.stand_in: Any = None
        """For loops that count batches by themselves: given for each batch of the pass under way that was trained before a restart, and
        once for each pass that was finished."""
        self.led = False
        """A library's loop goes over it, which puts back by itself what lies between passes."""

    def __iter__(self) -> Iterator[B]:
        """The next pass. It begins with its first batch: loops of libraries ask for an iterator before the script attaches."""
        job = attaching.current
        origin = _Origin(job is None or job.places.epoch < 0)
        if job is not None and not self.led:
            origin.looped, origin.site = script_code.is_looped(sys._getframe(1)), script_code.way(sys._getframe(1)).site
        made = self._iterate(origin)
        origin.iterator = weakref.ref(made)
        return made

    def _iterate(self, origin: _Origin) -> Iterator[B]:
        attaching.join_job()
        job = attaching.current
        yield from self._outside() if job is None else self._pass(job, origin)

    def __len__(self) -> int:
        """Steps of a pass. Raises TypeError for an IterableDataset without length."""
        if self._world == 1 and worker_place() is None:  # outside a job the loader is as it is
            return len(self._whole)
        return rounds_of(sample_order.length(self._whole), self._world)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        try:
            return getattr(self.loader, name)
        except AttributeError as error:
            raise AttributeError(str(error)) from None

    def _outside(self) -> Iterator[B]:
        global _begun
        _begun += 1
        yield from self.loader

    def _pass(self, job: TrainingJob, origin: _Origin) -> Iterator[B]:
        places = job.places
        job.variables.begin_pass(None if self.led else sys._getframe(1))
        job.began()
        job.make_owed()
        if job.zipped is not None and self._zip(origin, sys._getframe(1)) is job.zipped:
            return  # the pass beside it was over
        job.zipped = None
        way = None if self.led else script_code.way(sys._getframe(1))
        began_at = "" if way is None else way.site
        known = () if way is None else (began_at, origin.outside or way.endless, self._over, self._made_at)
        number, begin = job.carry_out(lambda: places.begin(*known))
        if not self.led:
            job.advise(self.loader.dataset)
        for _ in range(0 if self.stand_in is None else 1 if begin is None else int(begin["round"])):
            places.skip()
            yield self.stand_in
        if begin is None:
            job.passed_again(sys._getframe(1), began_at, number)
            if places.begun > number + 1:  # others had begun within it
                job.zipped = self._zip(origin, sys._getframe(1))
            return
        place, untold = begin, job.place.config.workers > 1 and not job.place.config.stages
        told = [knows.Pass(job.place) for knows in integrations_in_use() if knows.Pass is not None]
        ahead = Ahead(job.tables.modules, self._prefetch) if job.tables.modules else None
        made, given, look, called = job.made, 0, False, False
        taken = None if self.led else Taken(job, number, origin)
        try:
            drawn = generator_states() if places.began_before else None
            with torch.device("cpu"):  # torch's loaders draw their seed there, whatever the script's default device is
                feed = _placed(self._source, number, begin, ahead)
            job.totals.begin_pass(self._source.rounds, int(begin["round"]))
            if isinstance(self._source, Slices) and not begin["round"]:
                place = {**begin, "order": self._source.order}
            if drawn is not None:  # the loader that continues had drawn its seeds before
                put_generators(drawn)
            if told:
                feed = self._knowing_last(feed)
            while True:
                frame = None if self.led else sys._getframe(1)
                way = None if taken is None else taken.asked(frame)
                called = called or (way is not None and way.called)
                steps = threading.get_ident() == job.steps.thread
                if steps:
                    job.variables.at(frame)
                if places.ask(number, place) if way is None else places.ask(number, place, way.called, way.site):
                    job.put_back()
                if taken is not None and place is begin and (passed := int(begin["round"])):
                    taken.count_on(frame, passed)
                if taken is not None and places.known and places.inner:
                    taken.within()
                elif places.known:
                    job.step_boundary()
                if steps:
                    job.variables.at(None)
                found = next(feed, None)
                if found is None:
                    if steps:
                        job.catch_up()
                    if steps and began_at:
                        job.variables.ended(sys._getframe(1), began_at, number)
                    if places.has_beside:
                        job.zipped = self._zip(origin, sys._getframe(1))
                    return
                if untold and job.training:
                    untold = False
                    job.session.data({**self._source.facts(), "site": zlib.crc32(began_at.encode()), "number": number})
                place = found.place
                if found.again and places.reads_ahead(number) and job.training:
                    job.owes += 1
                elif not found.again or (job.training and found.batch is not None):
                    given += 1
                    places.give(found.again, place)
                    if not found.again:
                        job.totals.give()
                    job.watched.batch_given()
                    for one in told:
                        one.gives(found.last)
                    yield self._hand(found.batch)
                elif job.training:
                    job.absent_step()
        except Refused as refused:
            job.refuse(str(refused))
        except GeneratorExit:
            look = given == 1 and job.made == made and not begin["round"]  # the script wanted to see a batch
            if began_at and not (look or called) and threading.get_ident() == job.steps.thread:
                left = script_code.left_by(sys._getframe(1))
                if left is not None:
                    job.variables.ended(sys._getframe(1), began_at, number)
                    if script_code.has_else(left):
                        advice.tell_once("else", f"line {left.f_lineno}: {advice.ELSE}")
            raise
        finally:
            places.end(number, look)
            for one in told:
                one.over()

    @staticmethod
    def _zip(origin: _Origin, frame: FrameType) -> object:
        held = (each.thing for each in script_code.holders(origin.iterator(), frame))
        return next((each for each in held if isinstance(each, zip)), None)

    def _knowing_last(self, feed: Iterator[_Found]) -> Iterator[_Found]:
        """Each batch with whether it is the last of its pass. One without a known end is read one batch ahead for that."""
        if (rounds := self._source.rounds) is not None:
            for found in feed:
                yield found._replace(last=int(found.place["round"]) == rounds)
            return
        held = next(feed, None)
        while held is not None:
            following = next(feed, None)
            yield held._replace(last=following is None)
            held = following


@dataclass
class _Origin:
    """Where the iterator of a pass was made."""

    outside: bool
    """Before the loop over `ps.epochs`: it may continue in each of its epochs."""
    looped: bool = False
    """By a `for` loop itself."""
    site: str = ""
    iterator: Callable[[], object] = lambda: None


class Taken:
    """Finds out whether the place in one pass tells what steps were made of."""

    _looked_up: ClassVar[set[tuple[str, str]]] = set()
    """Where iterators are made and asked of which it is known that nothing counts what they give."""

    def __init__(self, job: TrainingJob, number: int, origin: _Origin) -> None:
        self._job, self._number, self._origin = job, number, origin
        self._first: script_code.BatchRequest | None = None

    def asked(self, frame: FrameType | None) -> script_code.BatchRequest:
        """The script asks for a batch."""
        places, job = self._job.places, self._job
        way = script_code.way(frame)
        if places.holds(self._number) and job.training and not job.watched.changed:
            self._lose("batches are read ahead of the steps that use them", ahead=True)
        elif threading.get_ident() != job.steps.thread:
            self._lose("another thread than the one that trains reads the batches", ahead=True)
        elif way.endless or (self._first is not None and way.advances(self._first, self._origin.looped)):
            self._lose("a loop advances that is not over the data, such as `for step in range(n)`")
        elif job.training and job.made and not places.batches and job.waits_at_its_place:
            self._lose("gradients are added after the step that used their batch")
        elif way.called and places.goes_on_by_calls(self._number):
            self._lose("`next` takes one batch after the other")
        elif places.goes_on_within(self._number):
            self._lose("the body of a loop over data takes one batch after the other of other data")
        elif self._first is None and not way.called and (counts := self._counting(frame, way)):
            self._lose(counts)
        self._first = self._first or way
        return way

    def within(self) -> None:
        """The pass is within another one, or beside it: no record is made where the script does not stand at a batch of that one."""
        job = self._job
        if job.training and job.places.trains and not (job.places.batches or job.places.is_beside):
            self._lose("a loop over data is within another one")
        else:
            job.carry_out(job.session.inside_round)

    def count_on(self, frame: FrameType | None, passed: int) -> None:
        """The pass continues in the middle, and so does an `enumerate` over it. One over several passes counts on with the first."""
        if self._origin.looped:
            return
        second = self._job.places.is_beside
        for each in script_code.holders(self._origin.iterator(), frame):
            if isinstance(each.thing, enumerate) and not (second and each.joins) and not script_code.count_on(each.thing, passed):
                advice.tell_once("counts", f"enumerate counts from 0 in a pass that continues at its batch {passed}")

    def _counting(self, frame: FrameType | None, way: script_code.BatchRequest) -> str:
        at = (self._origin.site, way.site)
        if self._origin.looped or at in self._looked_up:
            return ""
        iterator = self._origin.iterator()
        found = script_code.keeps_count(iterator, script_code.holders(iterator, frame), _is_own)
        if not found:
            self._looked_up.add(at)
        return found

    def _lose(self, why: str, ahead: bool = False) -> None:
        if self._job.places.lose(self._number if ahead else None):
            whole = "its epoch" if self._job.loops.begun else "its script"
            advice.tell_once(
                "steps",
                f"{why}. After a restart a worker computes again, without effect, what it had computed since the beginning of {whole}",
            )


def _is_own(iterator: object) -> bool:
    """Is it a pass of `ps.shard`?"""
    return getattr(iterator, "gi_code", None) is ShardedLoader._iterate.__code__


class _Found(NamedTuple):
    """A batch, whether it is another rank's or an earlier one, given for want of one's own, the place after it, and is it the last."""

    batch: Any
    again: bool
    place: Place
    last: bool = False


def _source(loader: Any, seed: int, rank: int, world: int) -> Source:
    """Raises Refused for what has no place that could be found again."""
    if not isinstance(loader, torch_data.DataLoader):
        raise Refused(f"shard takes a torch DataLoader, got {type(loader).__name__}; {_in_its_place(loader)}")
    if has_its_own(loader):
        return Yielded(loader, seed, rank, world)
    made = SampleStream if isinstance(loader.dataset, torch_data.IterableDataset) else Slices
    return made(loader, seed, rank, world)


def _in_its_place(loader: Any) -> str:
    """What to give to `shard` for what is no DataLoader."""
    name = type(loader).__name__
    if isinstance(loader, ShardedLoader):
        return "a loader is given to it once"
    if isinstance(loader, torch_data.Dataset):
        return "give it DataLoader(dataset, batch_size=…)"
    if isinstance(loader, Iterator):
        return "loop over it without shard if each worker makes batches of its own, else give shard the DataLoader that it reads"
    if not isinstance(loader, Sequence) and hasattr(loader, "__iter__"):
        return f"give it the DataLoader that {name} reads, as in {name}(ps.shard(loader))"
    return "wrap a list as DataLoader(list, batch_size=None)"


def _placed(source: Source, number: int, begin: Place, ahead: Ahead | None) -> Iterator[_Found]:
    """What is left of a pass. The loader has begun when this returns: a script's generators are put back after it has drawn from them."""
    if not isinstance(source, Slices):
        found: Iterator[_Found] = (_Found(*each) for each in source.feed(number, begin))
    else:
        turn = int(begin["round"])
        feed = source.feed(number, turn, ahead is not None)
        if source.order != begin.get("order", source.order):
            raise Refused(
                f"pass {number + 1} over the data draws other batches than it did before this restart, which was at its batch {turn}. Its "
                "sampler or its dataset is made of what runs again. Write `for epoch in ps.epochs(n)`, and keep in ps.state what they are "
                "made of"
            )
        found = _numbered(feed, turn, source)
    return found if ahead is None else _looking_ahead(found, ahead)


def _numbered(feed: Iterator[tuple[Any, bool]], turn: int, source: Slices) -> Iterator[_Found]:
    for batch, again in feed:
        turn += 1
        yield _Found(batch, again, {"round": turn, "order": source.order_at(turn)})


def _looking_ahead(feed: Iterator[_Found], ahead: Ahead) -> Iterator[_Found]:
    """Each batch when the one after it has been read."""
    held = next(feed, None)
    while held is not None:
        following = next(feed, None)
        ahead.handing(held.batch, None if following is None else following.batch)
        yield held
        held = following


def epochs(count: int | None = None) -> Epochs:
    """Loop over epochs, so that a restart continues in the middle of one.

    A script that is started again is given the epochs that are not finished, the first of them the one that was under way. Before its
    body runs, everything is as it was when that epoch began: `ps.state`, what `attach` was given, buffers, learning rates and random
    generators. At the place in the data where the record was taken they are put back as they were there. Call it after `attach`. Several
    loops, one after the other, are known by their order. Outside a job it is `range(count)`.

    Args:
        count: how many epochs; None: until the script leaves the loop.

    Returns:
        An iterator over the numbers of the epochs, from 0. Its `len` is how many are left; without `count` it has none.

    Raises:
        Refused: for a count that is no number of epochs, and in a job before `attach`. A job's process ends with
            status 77 and the sentence.

    Example:
        >>> import psjob as ps
        >>> state = ps.state(seen=0)
        >>> for epoch in ps.epochs(3):
        ...     state.seen += 1
        >>> epoch, state.seen
        (2, 3)
    """
    __tracebackhide__ = True
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        refuse(f"ps.epochs takes a number of epochs, such as ps.epochs(10), or nothing; got {count!r:.40}")
    return Epochs(count)


class Epochs:
    """One loop over epochs; made by `psjob.epochs`."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._number: int | None = None
        """Of this loop, once it has begun in a job."""
        self._next = 0
        self._over = False
        self._left = False
        """The script has come to the loop's end in this process."""

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("ps.epochs() without a count has no length")
        self._job()
        return 0 if self._is_over else self._count - self._next

    def __next__(self) -> int:
        job = self._job()
        is_over = self._is_over
        epoch = AFTER if is_over else self._next
        if job is not None and self._number is not None and not self._left:
            self._left = is_over
            job.begin_epoch(self._number, epoch, sys._getframe(1))
            if not is_over:
                job.totals.begin_epoch(self._count, epoch, job.session.clock)
        if is_over:
            raise StopIteration
        self._next += 1
        return epoch

    @property
    def _is_over(self) -> bool:
        return self._over or (self._count is not None and self._next >= self._count)

    def _job(self) -> TrainingJob | None:
        """The job; this loop has begun in it then."""
        job = _attached("ps.epochs was asked for an epoch", "everything")
        if job is not None and self._number is None:
            self._number = job.loops.begin(job.places.begun)
            over, at = job.loops.was_over(self._number), job.loops.was_at(self._number)
            if over is not None:
                self._over, job.places.begun = True, over
            elif at is not None:
                self._next, job.places.begun = at
        return job


def state(**first: Any) -> ScriptState:
    """Declare what the script carries from pass to pass, such as the best loss so far; a restart puts it back.

    In a job the values are in every resume record of this worker. They are read and assigned after `attach`. A restart puts them back
    before the first line that can read them. At the place in the data where the record was taken it puts them back again. Outside a job
    they are plain attributes.

    Args:
        first: by name, first values: numbers, texts, None, lists, dicts, sets, tensors and arrays, or objects with `state_dict` and
            `load_state_dict`, such as a scheduler that is made after `attach`. Tensors come back on the CPU, unless there is one of that
            name and shape.

    Returns:
        The one namespace of this process: `state.best`, `state.best = 0.5`. Further calls add names to it.

    Raises:
        Refused: for a name that is given twice, for a value that could not be put back, and in a job where a value is read or assigned
            before `attach`. A job's process ends with status 77 and the sentence.

    Example:
        >>> import psjob as ps
        >>> state = ps.state(best=0.0, history=[])
        >>> state.best = 0.5
        >>> state.history.append(state.best)
        >>> state.best, state.history
        (0.5, [0.5])
    """
    __tracebackhide__ = True
    one = the_state(lambda how: _attached(f"ps.state was {how}", "the values"))
    try:
        one._declare(first)
    except Refused as refused:
        refuse(str(refused))
    return one


def _attached(done: str, back: str) -> TrainingJob | None:
    """The job, and None outside one; before `attach` the script has `done` what it may not, and this process ends."""
    if worker_place() is None:
        return None
    attaching.join_job()
    if attaching.current is None:
        refuse(f"{done} before attach; call attach first: a restart puts {back} back there")
    return attaching.current
