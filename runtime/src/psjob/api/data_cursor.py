"""Where a script stands: in its data, in its loops over `ps.epochs`, and how many steps it will make in all. Pure.

`DataCursor` knows the passes over loaders, and the batches that the next step is made of. `EpochLoops` knows the epochs of each loop.
`Totals` makes of the epochs and the length of the data what an ETA is made of.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from psjob.process.errors import Refused

Place = Mapping[str, Any]
"""`round`: rounds of the pass that this worker has begun; `order`: what tells its batches from others. A pass over an IterableDataset keeps
what its stream needs beside it.
"""
START: Place = {"round": 0}
NOWHERE: Mapping[str, Any] = {"begun": 0, "asking": -1, "open": [], "looks": [], "behind": [], "stepped": False, "trail": [0, 0]}
"""Of a script that has not asked for data."""


@dataclass
class DataPass:
    """One that has begun and is not over."""

    number: int
    within: int = -1
    """The pass in whose body it began, or beside which, as in `zip`; -1: none."""
    beside: bool = False
    """It began beside that."""
    place: Place = field(default_factory=lambda: START)
    """It was asked for what follows this."""
    after: Place = field(default_factory=lambda: START)
    """Behind the batch that was given last."""
    site: str = ""
    """Where in the script it was asked last: see `asking.Way`."""
    goes_on: bool = False
    """It may continue from epoch to epoch: a restarted script makes its iterator before the first of them too."""
    given: int = 0
    """Batches that this process was given."""
    called: bool = False
    """It is asked for batches by calls, such as `next(batches)`, and not by a loop."""
    at_epoch: Place | None = None
    """The place at the beginning of the epoch of `ps.epochs`, if it began before."""
    stepped: bool = False
    """A step was made since it began, or since the epoch began."""
    trained: bool = False
    """Steps were made of its batches."""
    ahead: bool = False
    """Its batches are read before the steps that use those before them."""


@dataclass(frozen=True)
class _Kept:
    """An open pass of the record that this script continues from."""

    place: Place
    site: str
    trained: bool
    beside: bool
    """It continues beside the pass that asked last."""

    def written(self, number: int) -> dict[str, Any]:
        """For the next record."""
        return {"number": number, "place": dict(self.place), "site": self.site, "trained": self.trained, "beside": self.beside}


class DataCursor:
    """Passes are numbered in the order in which they begin, whichever loader they go over.

    A restarted script begins the same passes again: those that were over are given nothing, the one that asked last continues. Passes that
    began within one that is over are not begun again, as those of `zip` or of an evaluation in the loop's body. If the passes do not tell
    what the steps were made of, the script's place is found again by its steps only.
    """

    def __init__(self, edited: bool = False) -> None:
        """`edited`: the script may not be the one that the record was taken of, so that its lines have other numbers."""
        self._edited = edited
        self.begun = 0
        self.batches = 0
        """Given to the script since its last step."""
        self.skipping = False
        """The script was given no batch except what stands in for those of its time before a restart."""
        self.gone_on = False
        """The script's library puts back by itself how far it is."""
        self.epoch = -1
        """Passes that had begun at the beginning of the epoch of `ps.epochs`; -1: none has begun in this process."""
        self.began_before = False
        """The pass that began last had begun before the script's place, or its epoch."""
        self._again = False
        """The newest batches are other ranks', given again for want of one."""
        self._passes: dict[int, DataPass] = {}
        self._asking = -1
        """The pass that asked last."""
        self._loose = False
        self._held: set[int] = set()
        """Passes that have given batches since the last step."""
        self._looks: set[int] = set()
        """Passes of which the script wanted to see a batch or some, and trained on none: the lines that asked for them run again."""
        self._new_looks = 0
        """Batches of such passes since the last step."""
        self._behind: dict[int, int] = {}
        """Of passes within which others began, how many had begun when they were over."""
        self._outside = 0
        """Passes that had begun when the last loop over epochs was over."""
        self._stepped = False
        """Steps were made since then."""
        self._trail = self._trail_outside = self._kept_trail = (0, 0)
        """Checksums over where the passes began that a restarted script begins again: by line, and by function. Those outside of epochs,
        and those of the record."""
        self._lost_outside = False
        """The lines before a loop over epochs made steps of what is not known."""
        self._early: frozenset[int] = frozenset()
        """Passes that have given batches before the first epoch."""
        self._before = 0
        """So many passes had been begun when the record was taken that this script continues from."""
        self._kept: dict[int, _Kept] = {}
        self._back = -1
        """The pass that asked last then; -1: it has asked again."""
        self._goes_on_at: set[str] = set()
        """Where iterators are asked that were made before the first epoch."""
        self._gone_on: set[str] = set()
        """Where iterators were asked that continue from epoch to epoch."""
        self._beside: list[int] = []
        """Passes of the record that continue beside the one that asked last, once they are asked."""

    # -- passes --------------------------------------------------------------------------------

    def begin(self, site: str = "", goes_on: bool = False, over: str = "", made_at: str = "") -> tuple[int, Place | None]:
        """Number of the pass that begins now, and where it begins: None where it was over.

        `goes_on`: it may be one that was open at the beginning of the epoch. `over`: what tells its data from others, and
        `made_at` the call that has made their loader. Raises Refused if it is not known which one.
        """
        around = self._around()
        before = None
        if around is not None and around.site == site and self._beside:
            before = self._beside.pop(0)
        elif goes_on:
            before = self._going_on(site)
        self.began_before = before is not None
        if before is not None:
            kept = self._kept.pop(before)
            self._open(DataPass(before, place=kept.place, after=kept.place, site=site, goes_on=goes_on, trained=kept.trained), around)
            return before, kept.place
        if around is None:
            lines, functions = self._trail
            by_function = " < ".join(_functions(site))
            self._trail = zlib.crc32(f"{site}{over}{made_at}".encode(), lines), zlib.crc32(f"{by_function}{over}".encode(), functions)
        number = self.begun
        begin = self._begins(number)
        self.begun = number + 1 if begin is not None else max(number + 1, self._behind.get(number, 0))
        if begin is not None:
            trained = number == self._back and self._kept[number].trained
            self._open(DataPass(number, place=begin, after=begin, site=site, goes_on=goes_on, trained=trained), around)
        return number, begin

    def ask(self, number: int, place: Place, called: bool = False, site: str = "") -> bool:
        """The script asks for what follows in this pass, by a call or a loop. Does it stand where its record was taken?

        Raises Refused if a restart could not find it.
        """
        if number in self._early and self.epoch >= 0:
            raise Refused(
                f"{where(site)}: this iterator over ps.shard was asked before ps.epochs began, and is asked in its loop too. After a "
                "restart it could not continue: begin it within the loop, or do not ask it before"
            )
        one = self._passes[number]
        if one.goes_on:
            self._goes_on_at.add(where(site))
        elif 0 <= number < self.epoch and where(site) not in self._goes_on_at:
            raise Refused(
                f"{where(site)}: this iterator over ps.shard was made in an epoch of ps.epochs, and continues in another one. After a "
                "restart it could not be found: make it before the loop over ps.epochs, or in each epoch"
            )
        one.place, one.site, one.called = place, site, one.called or called
        self._asking = number
        if self._back != number:
            return False
        if self._trail[self._edited :] != self._kept_trail[self._edited :] and not self.gone_on:
            raise Refused(
                f"{where(site)}: after its restart the script comes to its place by other passes over the data than before. What is "
                "between passes runs again, and decided otherwise. Write `for epoch in ps.epochs(n)`, and keep in ps.state what decides"
            )
        self._back = -1
        self.begun = max(self.begun, self._before)
        self._beside = sorted(other for other, kept in self._kept.items() if kept.beside)
        self._kept.pop(number, None)
        return True

    def give(self, again: bool, after: Place = START) -> None:
        """The script is given a batch; `after` is the place behind it."""
        one = self._passes[self._asking]
        one.after, one.given = after, one.given + 1
        self._held.add(one.number)
        self._again = again and (self._again or not self.batches)
        self.batches += 1
        self.skipping = False

    def step(self) -> bool:
        """The script makes a step. Does it count for nothing, since it is of nothing except batches given again?"""
        self._stepped = True
        if not self.batches and all(one.called for one in self._passes.values()):
            self._loose, self._again = True, False
        if self._new_looks and self._new_looks == self.batches:  # no look, but a pass for each step
            self._loose = True
        for number, one in self._passes.items():
            one.trained, one.stepped = one.trained or number in self._held, True
        self.batches, self._new_looks, self._held = 0, 0, set()
        return self._again

    def end(self, number: int, look: bool) -> None:
        """The pass is over, or left. `look`: a restarted script shall have it again from its beginning."""
        one = self._passes.pop(number)
        if number == self._asking:
            self._asking = -1
        if look or (one.called and not (one.trained or one.ahead)):
            self._new_looks += 0 if one.stepped else one.given
            if one.within < 0:  # else the lines around it do not run again, or begin it anew
                self._looks.add(number)
        elif one.called:  # a call could not be answered with the end of that pass
            self._loose = True
        if one.within < 0:  # those beside it are over too
            self._kept = {other: kept for other, kept in self._kept.items() if other not in self._beside}
            self._beside = []
        if self.begun > number + 1:
            self._behind = {other: then for other, then in self._behind.items() if not number < other < self.begun}
            self._behind.setdefault(number, self.begun)

    def go_on(self) -> None:
        """The script continues at the pass under way by itself: it does not begin those that were finished again."""
        self.gone_on = True
        self.begun = min(self._kept, default=self._before)

    def skip(self) -> None:
        """The script is given what stands in for a batch of its time before a restart."""
        self.skipping = True

    def _begins(self, number: int) -> Place | None:
        if number >= self._before or number in self._looks:
            return START
        kept = self._kept.get(number)
        return None if kept is None or kept.beside else kept.place

    def _open(self, one: DataPass, around: DataPass | None) -> None:
        if around is not None:
            one.within, one.beside = around.number, around.site == one.site
        self._passes[one.number] = one

    def _around(self) -> DataPass | None:
        """The pass in whose body the script is: the newest one that a loop asks, and the first of those that it asks side by side."""
        found = max((one for one in self._passes.values() if one.given and not one.called), key=lambda one: one.number, default=None)
        while found is not None and (before := self._passes.get(found.within)) is not None and before.site == found.site:
            found = before
        return found

    def _going_on(self, site: str) -> int | None:
        if site in self._gone_on:  # the next pass of an endless generator
            return None
        there = [number for number, kept in self._kept.items() if number < self.epoch and not kept.beside]
        found = [number for number in there if self._kept[number].site == site] or [
            number for number in there if _functions(self._kept[number].site) == _functions(site)
        ]
        if len(found) > 1:
            raise Refused(
                f"{where(site)}: {len(found)} iterators over ps.shard continue from one epoch of ps.epochs to the next. After a restart it "
                "is not known which one this is. Ask each of them in a function of its own"
            )
        self._gone_on.add(site)
        return found[0] if found else None

    # -- what passes tell ----------------------------------------------------------------------

    def lose(self, ahead: int | None = None) -> bool:
        """The passes do not tell what steps are made of. `ahead`: a pass whose batches are read before their turn. Is that new?"""
        new, self._loose = not self._loose, True
        if ahead is not None:
            self._passes[ahead].ahead = True
        return new

    def holds(self, number: int) -> bool:
        """Has the pass given a batch since the last step?"""
        return number in self._held

    def reads_ahead(self, number: int) -> bool:
        """Are batches of this pass read before the steps that use those before them?"""
        return self._passes[number].ahead

    def goes_on_by_calls(self, number: int) -> bool:
        """Was this pass asked by a call before, and steps were made since? A restart does not know which of the calls run again."""
        one = self._passes[number]
        return one.called and one.stepped and one.given > 0

    def goes_on_within(self, number: int) -> bool:
        """Is a pass open that began in the body of this one, and continues from batch to batch of it?"""
        site = self._passes[number].site
        return any(one.within == number and one.site != site for one in self._passes.values())

    @property
    def only_within(self) -> bool:
        """Were all batches since the last step given by passes within the one that asks, such as an evaluation in its body?"""
        return bool(self._held) and min(self._held) > self._asking

    @property
    def under_way(self) -> tuple[int, int] | None:
        """The newest pass that has begun and is not over, and rounds of it that were begun; None between passes."""
        one = self._passes.get(max(self._passes, default=-1))
        return None if one is None else (one.number, int(one.after["round"]))

    @property
    def trains(self) -> bool:
        """Were steps made of batches of the pass that asked last?"""
        return self._asking in self._passes and self._passes[self._asking].trained

    @property
    def inner(self) -> bool:
        """Has the pass that asked last begun within another one, or beside it?"""
        return self._passes[self._asking].within in self._passes or self.is_beside

    @property
    def has_beside(self) -> bool:
        """Do passes of the record continue beside this one that were not asked yet?"""
        return bool(self._beside)

    @property
    def is_beside(self) -> bool:
        """Is the pass that asked last one of several that the same line of a loop asks, as in `zip`, and not the first?"""
        return self._passes[self._asking].beside

    # -- records -------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, follows: bool = False) -> dict[str, Any] | None:
        """An epoch of `ps.epochs` begins, which `follows` another one of its loop, or the loop is over: `epoch` is below 0.

        Returns where the script is in its data, as `load` takes it. None: a restart could not continue here, since it would run lines again
        that make steps. Or steps of the epoch may use what was read before.
        """
        runs_again, new = epoch >= 0 and not follows, self.begun > self._before
        reads_on = new and self._stepped and any(one.ahead and number not in self._early for number, one in self._passes.items())
        self._loose = self._loose or reads_on
        if runs_again and new:
            self._run_again()
        if self._lost_outside or reads_on:
            return None
        if self.epoch < 0:
            self._early = frozenset(one.number for one in self._passes.values() if one.given)
        if follows:  # what was begun in the epoch that is over does not begin again
            self._looks = {number for number in self._looks if number < self.epoch}
            self._behind = {number: then for number, then in self._behind.items() if number < self.epoch}
        if epoch < 0:
            self._outside, self._stepped = self.begun, False
        if runs_again:
            self._trail_outside = self._trail
        else:
            self._trail = self._trail_outside
        self._loose, self.epoch, self._asking = False, self.begun, -1
        for one in self._passes.values():
            one.stepped, one.at_epoch = False, one.after
        return self._state()

    def _run_again(self) -> None:
        """A loop over epochs begins: after a restart the lines before it run again. If they made no steps, they are given all again."""
        if not self._stepped:
            self._looks |= set(range(self._outside, self.begun))
            self._behind = {number: then for number, then in self._behind.items() if number < self._outside}
        elif self._loose:
            self._lost_outside = True

    @property
    def known(self) -> bool:
        """Do the passes say how far the script is? Not where there are none, or a step was made beside them."""
        return self.begun > 0 and not self._loose

    @property
    def state(self) -> dict[str, Any] | None:
        """For a resume record; None where the script's place is not known."""
        return self._state() if self.known else None

    def _state(self) -> dict[str, Any]:
        found = {one.number: self._goes_on(one) for one in self._passes.values()}
        return {
            "begun": self.begun,
            "asking": self._asking,
            "open": [
                *(self._written(self._passes[number], place) for number, place in found.items() if place is not None),
                *(kept.written(number) for number, kept in self._kept.items()),
            ],
            "looks": sorted(self._looks | {number for number, place in found.items() if place is None}),
            "behind": [list(each) for each in self._behind.items()],
            "stepped": self._stepped,
            "trail": list(self._trail),
        }

    def _goes_on(self, one: DataPass) -> Place | None:
        """Where it continues after a restart; None: the lines that asked for its batches run again."""
        if one.number == self._asking:
            return one.place
        if one.number in self._early or (one.called and one.at_epoch is None):
            return None
        return one.at_epoch if one.called else one.after  # steps have used what a loop was given

    def _written(self, one: DataPass, place: Place) -> dict[str, Any]:
        return _Kept(place, one.site, one.trained, one.within >= 0 and one.within == self._asking).written(one.number)

    def load(self, state: Mapping[str, Any]) -> None:
        """Before the first pass: continue from what `state` gave. Raises Refused on anything else."""
        try:
            self._before, self._back = int(state["begun"]), int(state["asking"])
            self._kept = {
                int(one["number"]): _Kept(
                    {**one["place"], "round": int(one["place"]["round"])}, str(one["site"]), bool(one["trained"]), bool(one["beside"])
                )
                for one in state["open"]
            }
            self._looks = {int(number) for number in state["looks"]}
            if self._back >= 0:
                self._kept[self._back]
            self._behind = {int(number): int(then) for number, then in state["behind"]}
            lines, functions = state["trail"]
            self._stepped, self._kept_trail = bool(state["stepped"]), (int(lines), int(functions))
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the resume record is damaged: its place in the data is not in shape: {error!r}") from None


def where(site: str) -> str:
    """The place in the script, for its reader: `train.py: main: 12`."""
    return site.partition(" < ")[0].partition("+")[0]


def _functions(site: str) -> list[str]:
    return [frame.rpartition(":")[0] for frame in site.split(" < ")]


AFTER: Final = -1
"""In place of an epoch: behind the loop, which is over."""


class EpochLoops:
    """Loops are numbered in the order in which they begin, epochs from 0 in each.

    A restarted script begins the same loops again: those that were over get nothing, the one that was under way continues at its epoch.
    `passes` are how many passes over data had begun at some moment.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._loop = -1
        self._epoch = AFTER
        """Of that loop, the one from which a restart continues."""
        self.under_way = -1
        """The loop that was asked last and is not over; -1: none is."""
        self._at: Mapping[str, Any] = NOWHERE
        """Where `DataCursor` were then."""
        self._ends: list[int] = []
        """Passes at the end of each loop that is over."""
        self._over = 0
        """So many of them were when that epoch began."""
        self._kept_loop = -1
        self._kept_epoch = AFTER
        self.kept_at: Mapping[str, Any] = NOWHERE
        """Where `DataCursor` were at the beginning of the epoch that `load` has found."""
        self._kept_ends: list[int] = []

    def begin(self, passes: int) -> int:
        """Number of the loop that begins now; those before it are over."""
        if self.under_way >= 0:
            self._end(self.under_way, passes)
        number = self.begun
        self.begun += 1
        return number

    def was_over(self, number: int) -> int | None:
        """Passes at the end of a loop that the record says is over, else None."""
        return self._kept_ends[number] if number < len(self._kept_ends) else None

    def was_at(self, number: int) -> tuple[int, int] | None:
        """Where this loop continues: its epoch, or AFTER, and the passes then; None if it begins at its beginning or was over before."""
        return (self._kept_epoch, int(self.kept_at["begun"])) if number == self._kept_loop else None

    def give(self, number: int, epoch: int, passes: int, at: Mapping[str, Any] | None) -> None:
        """The script is given this epoch of a loop, or none: AFTER.

        `at`: what `DataCursor.begin_epoch` gives; None: a restart cannot continue here, and does from the beginning before.
        """
        self.under_way = number
        if epoch == AFTER:
            self.under_way = -1
            self._end(number, passes)
        if at is not None:
            self._loop, self._epoch, self._at, self._over = number, epoch, at, len(self._ends)

    def _end(self, number: int, passes: int) -> None:
        if number >= len(self._ends):
            self._ends += [passes] * (number + 1 - len(self._ends))

    @property
    def state(self) -> dict[str, Any] | None:
        """For a resume record; None for a script without such loops."""
        if not self.begun:
            return None
        return {"loop": self._loop, "epoch": self._epoch, "at": dict(self._at), "ends": self._ends[: self._over]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Before the first loop: continue from what `state` gave. Raises Refused on anything else."""
        try:
            self._kept_loop, self._kept_epoch, self.kept_at = int(state["loop"]), int(state["epoch"]), dict(state["at"])
            int(self.kept_at["begun"])
            self._kept_ends = [int(passes) for passes in state["ends"]]
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the resume record is damaged: its place in the epochs is not in shape: {error!r}") from None


CHANGE = 0.01
"""Part by which an estimate has changed before it is sent again."""


class Totals:
    """Steps of a loop over `ps.epochs`. The first epoch is estimated by its data, the others by the one before."""

    def __init__(self) -> None:
        self.by_script = False
        """The script tells the number itself."""
        self._epochs: int | None = None
        self._epoch = self._began = 0
        self._of_an_epoch: float | None = None
        self._rounds: int | None = 0
        """Batches of this worker in the epoch's passes so far; None: a pass has no length."""
        self._skipped = self._given = 0
        """Batches before the place where a restart has continued, and those given since."""
        self._told: float | None = None

    def begin_epoch(self, epochs: int | None, epoch: int, clock: int) -> None:
        """Epoch number `epoch` of `epochs` begins, or continues after a restart. `clock`: steps that this worker has made."""
        follows = epochs == self._epochs and epoch == self._epoch + 1
        self._of_an_epoch = float(clock - self._began) if follows and clock > self._began and not self._skipped else None
        self._epochs, self._epoch, self._began = epochs, epoch, clock
        self._rounds, self._skipped, self._given = 0, 0, 0

    def begin_pass(self, rounds: int | None, place: int) -> None:
        """A pass over so many batches of this worker begins, or continues at its batch `place`."""
        self._rounds = None if rounds is None or self._rounds is None else self._rounds + rounds
        self._skipped += place

    def give(self) -> None:
        """The script is given a batch."""
        self._given += 1

    def total(self, clock: int) -> int | None:
        """Steps in all; None: not known yet, or never."""
        if not self._epochs:
            return None
        of_an_epoch, before = self._of_an_epoch, float(self._began)
        if of_an_epoch is None:
            made = clock - self._began
            if not self._rounds or not self._given or not made:
                return None
            steps = made / self._given  # a step may take several batches
            of_an_epoch, before = self._rounds * steps, self._began - self._skipped * steps
        return max(clock, round(before + (self._epochs - self._epoch) * of_an_epoch))

    def news(self, clock: int) -> int | None:
        """The total, if it is another than was sent last."""
        if self.by_script or (found := self.total(clock)) is None:
            return None
        least = 0.0 if clock == self._began else CHANGE  # at an epoch's beginning it is known
        if self._told is not None and abs(found - self._told) <= least * self._told:
            return None
        self._told = found
        return found
