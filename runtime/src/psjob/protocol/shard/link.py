"""A shard's link to the coordinator: when to dial, when to say hello, when to give a silent stream up, when to give up at all."""

from __future__ import annotations

from psjob import contract
from psjob.protocol.shard import events as e
from psjob.protocol.shard.actions import Action, Dial, Exit, HangUp, Log

AGAIN_SECONDS = 0.1
"""Between two dials."""
SILENCE_SECONDS = 10.0
"""A coordinator without a word for so long is dialled anew: its node may be cut off, and its successor has its name."""
FIRST_SECONDS = 30.0
"""The same for its first word: it listens before it has imported torch."""


class LinkState:
    """`address` is where the coordinator listens; it is looked for at most `seconds`."""

    def __init__(self, address: str, seconds: float) -> None:
        self._address, self._seconds = address, seconds
        self._deadline: float | None = None
        self.stream: int | None = None
        self.met = False
        """The coordinator has said a word."""
        self._heard = 0.0
        self._limit = FIRST_SECONDS

    @property
    def begun(self) -> bool:
        """The link is in use."""
        return self._deadline is not None

    def handle(self, event: e.Event, now: float) -> list[Action]:
        """What the link does; events of another stream than the one in use are of the past."""
        match event:
            case e.Begin():
                self._deadline = now + self._seconds
                return [Dial(0.0)]
            case e.Connected():
                self.stream, self._heard, self._limit = event.stream, now, FIRST_SECONDS
            case e.Unreached():
                if not self.met and self._deadline is not None and now > self._deadline:
                    text = f"the coordinator at {self._address} was not found in {self._seconds:.0f} s; starting again"
                    return [Exit(contract.EXIT_RETRY, text)]
                return [Dial(AGAIN_SECONDS)]
            case e.Ordered() if event.stream is not None and event.stream == self.stream:
                self.met, self._heard, self._limit = True, now, SILENCE_SECONDS
            case e.Lost() if event.stream == self.stream:
                return self._again(event.why, now)
            case e.Tick() if self.stream is not None and now - self._heard > self._limit:
                return self.hang_up(f"the coordinator said nothing for {self._limit:.0f} s", now)
        return []

    def hang_up(self, why: str, now: float) -> list[Action]:
        """Give the stream in use up, and dial anew."""
        if self.stream is None:
            return []
        return [HangUp(self.stream), *self._again(why, now)]

    def _again(self, why: str, now: float) -> list[Action]:
        self.stream = None
        said: list[Action] = [Log("warning", f"stream to the coordinator: {why}")] if why else []
        return said + self.handle(e.Unreached(), now)
