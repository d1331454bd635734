"""Where a script stands in its data: passes over loaders, and the batches that its next step is made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob.process.errors import Refused

Place = Mapping[str, Any]
"""`round`: rounds of the pass that this worker has begun; `left`: nothing more of it is wanted. A pass over an IterableDataset keeps
what `streams.py` needs beside them."""
START: Place = {"round": 0}


class Places:
    """Passes are numbered in the order in which they begin, whichever loader they go over.

    A restarted script begins the same passes again: those that were over are given nothing, those that were open go on.
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
        """A step was made beside all passes: the script's place is found again by its steps alone."""
        self._before = 0
        """So many passes had been begun when the record was taken that this script goes on from."""
        self._kept: dict[int, Place] = {}
        self._back = -1
        """The pass that asked last then."""

    def begin(self) -> tuple[int, Place | None]:
        """Number of the pass that begins now, and where it begins: None where it was over."""
        number = self.begun
        self.begun += 1
        self._open = {other: place for other, place in self._open.items() if not place.get("left")}
        return number, START if number >= self._before else self._kept.get(number)

    def go_on(self) -> None:
        """The script goes on at the pass under way by itself: it does not begin those that were finished again."""
        self.gone_on = True
        self.begun = min((number for number, place in self._kept.items() if not place.get("left")), default=self._before)

    def skip(self) -> None:
        """The script is given what stands in for a batch of its time before a restart."""
        self.skipping = True

    def ask(self, number: int, place: Place) -> bool:
        """The script asks for what follows in this pass. Does it stand where its record was taken?"""
        self._open[number], self._asking = place, number
        back, self._back = self._back == number, -1 if self._back == number else self._back
        return back

    def give(self, again: bool) -> None:
        """The script is given a batch."""
        self._again = again and (self._again or not self.batches)
        self.batches += 1
        self.skipping = False

    def step(self) -> bool:
        """The script makes a step. Does it count for nothing, since it is of nothing but batches given again?"""
        within = any(not place.get("left") for place in self._open.values())
        if not (within or self.batches):
            self._loose, self._again = True, False
        self.batches = 0
        return self._again

    def end(self, number: int, again: bool) -> None:
        """The pass is over, or left. `again`: a restarted script shall have it again from its beginning."""
        self._open[number] = START if again else {**self._open.get(number, START), "left": True}

    @property
    def known(self) -> bool:
        """Do the passes say how far the script is? Not where there are none, or a step was made beside them."""
        return self.begun > 0 and not self._loose

    @property
    def state(self) -> dict[str, Any] | None:
        """For a resume record; None where the script's place is not known."""
        if not self.known:
            return None
        return {"begun": self.begun, "asking": self._asking, "open": [[number, dict(place)] for number, place in self._open.items()]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Before the first pass: go on from what `state` gave. Raises Refused on anything else."""
        try:
            self._before, self._back = int(state["begun"]), int(state["asking"])
            self._kept = {int(number): {**place, "round": int(place["round"])} for number, place in state["open"]}
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the resume record is damaged: its place in the data is not in shape: {error!r}") from None
        self._open = {number: place for number, place in self._kept.items() if place == START}
