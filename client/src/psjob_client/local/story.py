"""What is told to the user while a job runs: its script's output, what psjob does about failures, how to go on."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from psjob_client.local.backend import Backend
from psjob_client.local.children import ChildProcess
from psjob_client.local.command import Command
from psjob_client.local.display import Display
from psjob_client.local.folder import Folder, tail_of
from psjob_client.local.output import Follow
from psjob_client.local.probe import WARNINGS
from psjob_client.local.record import Record
from psjob_client.local.request import Request
from psjob_client.local.standing import Standing
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.status import TERMINAL
from psjob_operator.contract import EXIT_DONE, EXIT_FENCED, EXIT_REFUSED, EXIT_RETRY
from psjob_operator.plan.actions import Event
from psjob_operator.plan.process_outcome import FROM_OUTSIDE

MANY = 16
"""Processes a core that are worth a word."""
REFUSED = "Refused"
"""The reason of an event, as of the condition that the job ends with."""
QUIET = frozenset({EXIT_DONE, EXIT_RETRY, EXIT_FENCED})


class Story:
    """Everything that is said between the first line and the last."""

    def __init__(self, display: Display, folder: Folder, shown: frozenset[int]) -> None:
        """`shown`: workers whose lines are passed on, with their numbers where those are several."""
        self.display = display
        self.record = Record(folder)
        self._folder, self._shown = folder, shown
        self._follows: dict[str, Follow] = {}
        self._last_tail = ""
        self._warned: object = None
        self.standing = Standing(display.unit)

    def opening(self, job: PSTrainingJob, command: Command, again: list[str]) -> None:
        """The job in one line, and what of its manifest has no meaning here. `again`: the words that would start it once more."""
        spec = job.spec
        self.record.open(job, command.folder, again)
        self.display.say(
            f"{job.metadata.name}: {spec.training.mode}, {_count(spec.workers.replicas, 'worker')} and {_count(spec.ps.shards, 'shard')}"
            f" on this machine; run {self.near(self._folder.path)}"
        )
        if spec.workers.replicas > 1 and self._shown == {0}:
            self.display.say("the lines of worker 0 follow; --logs all shows those of every worker")
        processes, cores = spec.workers.replicas + spec.ps.shards, os.cpu_count() or 1
        if processes > MANY * cores:
            self.display.say(
                f"{processes} processes share {cores} cores; fewer are faster: --set spec.workers.replicas={2 * cores}", "yellow"
            )
        if command.unused:
            self.display.say(f"not used on this machine: {', '.join(command.unused)}")

    def event(self, event: Event) -> None:
        """Something that the plan did."""
        self.record.event(event)
        if event.type == "Warning" and event.reason != REFUSED:  # the last line says it
            self.display.say(f"{event.reason}: {event.message}", "yellow")

    def ended(self, child: ChildProcess) -> None:
        """A process has ended: the end of its log, where that is news."""
        self._pass_on(child, whole=True)
        self.record.ended(child)
        if child.code in QUIET or child.deleting is not None or (child.signal in FROM_OUTSIDE and not child.problem):
            return
        how = f"was ended by signal {child.signal}" if child.signal else f"ended with exit code {child.code}"
        tail = child.problem or tail_of(self._folder.log(child.name))
        if child.code == EXIT_REFUSED:  # in a sentence, which is the last line of its log
            tail = tail.rpartition("\n")[2]
        news = "" if not tail or self._is_shown(child) else ", as another did" if tail == self._last_tail else ":\n" + tail
        self._last_tail = tail
        self.display.say(f"{child.name} {how}{news}", "yellow")

    def show(self, backend: Backend) -> None:
        """New output of the script, and where the job stands."""
        for child in backend.children:
            self._pass_on(child, whole=False)
        self.record.look(backend)
        told = backend.watch.coordinator
        warning = next((told[name] for name in WARNINGS if told.get(name)), None)
        if warning and warning != self._warned:
            self._warned = warning
            self.display.say(f"warning: {warning}", "yellow")
        if backend.phase not in TERMINAL:
            for line in self.standing.see(backend.watch.step, told, time.time()):
                self.display.say(line, "yellow")
        drawn = next((self._follows[child.name].drawn for child in backend.children if child.running and child.name in self._follows), "")
        self.display.refresh(backend.status, backend.watch, drawn)

    def farewell(self, request: Request, backend: Backend) -> None:
        """After Ctrl-C: how to go on."""
        words = request.words()
        if backend.watch.coordinator.get("checkpoint"):
            step = backend.watch.coordinator["checkpoint"].get("step")
            unit = self.display.unit
            self.display.say(f"stopped at {unit} {backend.watch.step}, checkpoint at {unit} {step}. Go on with:")
            path = self.near(backend.folder.path)
            words = ["psjob", "resume", backend.folder.run] if request.from_input else request.words("--resume", path)
        else:
            self.display.say("stopped before a checkpoint was committed. Start again with:")
        self.display.say("  " + shlex.join(words))

    @staticmethod
    def near(path: Path) -> str:
        """A path as seen from here, where it lies below."""
        relative = os.path.relpath(path)
        return str(path) if relative.startswith("..") else relative

    def _is_shown(self, child: ChildProcess) -> bool:
        return child.role == "worker" and child.index in self._shown

    def _pass_on(self, child: ChildProcess, *, whole: bool) -> None:
        if not self._is_shown(child):
            return
        rank = f"{child.index}: " if len(self._shown) > 1 else ""
        follow = self._follows.setdefault(child.name, Follow(self._folder.log(child.name)))
        for line in follow.lines(whole=whole):
            self.display.output(rank + line)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
