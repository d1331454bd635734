"""Where a script stands in its data: passes over loaders, and the batches that its next step is made of. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from psjob.process.errors import Refused

Place = Mapping[str, Any]
"""`round`: rounds of the pass that this worker has begun; `left`: nothing more of it is wanted. A pass over an IterableDataset keeps
what `streams.py` needs beside them."""
START: Place = {"round": 0}
NOWHERE: Mapping[str, Any] = {"begun": 0, "asking": -1, "open": [], "called": [], "trained": [], "sites": [], "behind": []}
"""Of a script that has not asked for data."""


class Places:
    """Passes are numbered in the order in which they begin, whichever loader they go over.

    A restarted script begins the same passes again: those that were over are given nothing, those that were open go on. Passes that began
    within one that is over are not begun again, as those of `zip` or of an evaluation in the loop's body.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.batches = 0
        """Given to the script since its last step."""
        self._again = False
        """The newest batches are other ranks', given again for want of one."""
        self._open: dict[int, Place] = {}
        self.skipping = False
        """The script was given no batch but what stands in for those of its time before a restart."""
        self.gone_on = False
        """The script's library puts back by itself how far it is."""
        self._asking = -1
        """The pass that asked last."""
        self._loose = False
        """A step was made beside all passes, or the passes do not tell what steps were made of: the script's place is found again by its
        steps only."""
        self._ahead: set[int] = set()
        """Passes whose batches are read before the steps that use those before them."""
        self.epoch = -1
        """Passes that had begun at the beginning of the epoch of `ps.epochs`; -1: none has begun in this process."""
        self._early: frozenset[int] = frozenset()
        """Passes that have given batches before the first epoch."""
        self._sites: dict[int, str] = {}
        """Of open passes, where in the script they were asked last: `train.py: main: 12`."""
        self._held: set[int] = set()
        """Passes that have given a batch since the last step."""
        self._stepped: set[int] = set()
        """Open passes of whose batches steps were made."""
        self._after: dict[int, Place] = {}
        """Of open passes, the place behind the batch that was given last."""
        self._called: set[int] = set()
        """Passes of which a batch was asked for by a call, and not by a loop."""
        self._looked: list[int] = []
        """Passes since the last step of which one batch was given, and nothing more was wanted."""
        self._before = 0
        """So many passes had been begun when the record was taken that this script goes on from."""
        self._kept: dict[int, Place] = {}
        self._behind: dict[int, int] = {}
        """Of passes within which others began, how many had begun when they were over."""
        self._here: set[int] = set()
        """Open passes that this process has begun."""
        self._pending: list[int] = []
        """Open passes that began within the one that the script stands in: they are the next ones."""
        self.began_before = False
        """The pass that began last had begun before the script's place, or its epoch."""
        self._back = -1
        """The pass that asked last then."""

    def begin(self, site: str = "", goes_on: bool = False) -> tuple[int, Place | None]:
        """Number of the pass that begins now, and where it begins: None where it was over.

        `goes_on`: it may be one that was open at the beginning of the epoch. Raises Refused if it is not known which one.
        """
        self._open = {other: place for other, place in self._open.items() if not place.get("left")}
        before = self._pending.pop(0) if self._pending else self._going_on(site) if goes_on else None
        self.began_before = before is not None
        if before is not None:
            self._here.add(before)
            return before, self._kept[before]
        number = self.begun
        begin = START if number >= self._before else self._kept.get(number)
        if begin is not None and number in self._called and number != self._back:
            begin = START  # the lines that asked for it run again
        self.begun = number + 1
        if begin is None or begin.get("left"):
            self.begun = max(self.begun, self._behind.get(number, 0))
        else:
            self._here.add(number)
        return number, begin

    def go_on(self) -> None:
        """The script goes on at the pass under way by itself: it does not begin those that were finished again."""
        self.gone_on = True
        self.begun = min((number for number, place in self._kept.items() if not place.get("left")), default=self._before)

    def skip(self) -> None:
        """The script is given what stands in for a batch of its time before a restart."""
        self.skipping = True

    def lose(self, ahead: int | None = None) -> bool:
        """The passes do not tell what steps are made of. `ahead`: a pass whose batches are read before their turn. Is that new?"""
        new, self._loose = not self._loose, True
        if ahead is not None:
            self._ahead.add(ahead)
        return new

    def holds(self, number: int) -> bool:
        """Has the pass given a batch since the last step?"""
        return number in self._held

    @property
    def only_within(self) -> bool:
        """Were all batches since the last step given by passes within the one that asks, such as an evaluation in its body?"""
        return bool(self._held) and min(self._held) > self._asking

    def reads_ahead(self, number: int) -> bool:
        """Are batches of this pass read before the steps that use those before them?"""
        return number in self._ahead

    @property
    def trains(self) -> bool:
        """Were steps made of batches of the pass that asked last?"""
        return self._asking in self._stepped

    def _going_on(self, site: str) -> int | None:
        function = site.rpartition(":")[0]
        there = [n for n in self._sites if n in self._kept and n < self.epoch and n not in self._here and not self._kept[n].get("left")]
        found = [n for n in there if self._sites[n] == site] or [n for n in there if self._sites[n].rpartition(":")[0] == function]
        if len(found) > 1:
            raise Refused(
                f"{site}: {len(found)} iterators over ps.shard go on from one epoch of ps.epochs to the next. After a restart it is not "
                "known which one this is. Ask each of them in a function of its own"
            )
        return found[0] if found else None

    def ask(self, number: int, place: Place, called: bool = False, site: str = "") -> bool:
        """The script asks for what follows in this pass, by a call or a loop. Does it stand where its record was taken?

        Raises Refused if a restart could not find it.
        """
        if number in self._early and self.epoch >= 0:
            raise Refused(
                f"{site}: this iterator over ps.shard was asked before ps.epochs began, and is asked in its loop too. After a restart it "
                "could not go on: begin it within the loop, or do not ask it before"
            )
        self._sites[number] = site
        if called:
            self._called.add(number)
        self._open[number], self._asking = place, number
        back, self._back = self._back == number, -1 if self._back == number else self._back
        if back:
            self.begun = max(self.begun, self._before)
            kept = (other for other, at in self._kept.items() if other > number and not at.get("left") and other not in self._called)
            self._pending = sorted(other for other in kept if other not in self._here)
        return back

    @property
    def inner(self) -> bool:
        """Has the pass that asked last begun within another one, or beside it?"""
        under_way = (number for number in self._after if number not in self._called or self._open[number] != START)
        return any(number < self._asking for number in under_way)

    def give(self, again: bool, after: Place = START) -> None:
        """The script is given a batch; `after` is the place behind it."""
        self._after[self._asking] = after
        self._again = again and (self._again or not self.batches)
        self.batches += 1
        self.skipping = False
        self._held.add(self._asking)

    def step(self) -> bool:
        """The script makes a step. Does it count for nothing, since it is of nothing but batches given again?"""
        within = any(not place.get("left") for place in self._open.values())
        if not (within or self.batches):
            self._loose, self._again = True, False
        if self._looked and len(self._looked) == self.batches:  # no look, but a pass for each step
            self._open.update({number: {"round": 1, "left": True} for number in self._looked})
            self._loose = True
        self._stepped |= self._held & {number for number, place in self._open.items() if not place.get("left")}
        self.batches, self._held, self._looked = 0, set(), []
        return self._again

    def end(self, number: int, again: bool) -> None:
        """The pass is over, or left. `again`: a restarted script shall have it again from its beginning."""
        self._open[number] = START if again else {**self._open.get(number, START), "left": True}
        if again:
            self._looked.append(number)
        elif number in self._called:  # a call could not be answered with the end of that pass
            self._loose = True
        self._here.discard(number)
        self._ahead.discard(number)
        self._sites.pop(number, None)
        if self.begun > number + 1:
            self._behind = {other: then for other, then in self._behind.items() if not number < other < self.begun}
            self._behind.setdefault(number, self.begun)
        self._after.pop(number, None)
        self._stepped.discard(number)
        self._called.discard(number)

    def begin_epoch(self) -> dict[str, Any]:
        """An epoch of `ps.epochs` begins: where the script is in its data, as `load` takes it.

        Raises Refused if steps of the epoch will use what was read before.
        """
        if self._ahead & self._open.keys():
            raise Refused(
                "steps of the next epoch would use batches that are read already. After a restart they could not be found again: begin the "
                "pass over ps.shard(loader) within the epoch"
            )
        if self.epoch < 0:
            self._early = frozenset(self._after)
        self._loose, self.epoch = False, self.begun
        self._behind = {number: then for number, then in self._behind.items() if number >= self.begun}
        return self._state(-1)

    @property
    def known(self) -> bool:
        """Do the passes say how far the script is? Not where there are none, or a step was made beside them."""
        return self.begun > 0 and not self._loose

    @property
    def state(self) -> dict[str, Any] | None:
        """For a resume record; None where the script's place is not known."""
        if not self.known:
            return None
        return self._state(self._asking)

    def _state(self, asking: int) -> dict[str, Any]:
        opened = dict(self._opened(asking))
        return {
            "begun": self.begun,
            "asking": asking,
            "open": [[number, dict(place)] for number, place in opened.items()],
            "called": sorted(self._called & opened.keys()),
            "trained": sorted(self._stepped & opened.keys()),
            "sites": [[number, site] for number, site in self._sites.items() if number in opened],
            "behind": [list(each) for each in self._behind.items()],
        }

    def _opened(self, asking: int) -> Iterator[tuple[int, Place]]:
        """Passes that go on. All but the one that asks go on behind what they gave, since steps have used that."""
        for number, place in self._open.items():
            if number == asking or place.get("left"):
                yield number, place
            elif number < asking or asking < 0 or number not in self._called:  # else the script would begin another one
                yield number, self._after.get(number, place)

    def load(self, state: Mapping[str, Any]) -> None:
        """Before the first pass: go on from what `state` gave. Raises Refused on anything else."""
        try:
            self._before, self._back = int(state["begun"]), int(state["asking"])
            self._kept = {int(number): {**place, "round": int(place["round"])} for number, place in state["open"]}
            self._behind = {int(number): int(then) for number, then in state["behind"]}
            self._called = {int(number) for number in state["called"]}
            self._stepped = {int(number) for number in state["trained"]}
            self._sites = {int(number): str(site) for number, site in state["sites"]}
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the resume record is damaged: its place in the data is not in shape: {error!r}") from None
        self._open = {number: place for number, place in self._kept.items() if not place.get("left")}
