"""Shard 0 keeps the cuts of a job that leaves them to psjob: the first ones that worker 0 tells, durably before anybody hears them.

They lie beside the run's checkpoints, whose blocks break at them. Each stream asks one question and ends.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from psjob.checkpoint import claim, disk
from psjob.checkpoint.problems import CheckpointProblem, explain
from psjob.pipeline.chosen import ChosenCuts
from psjob.process.config import Place
from psjob.process.errors import Fenced
from psjob.wire.event_loop import InOwnThread, NonBlockingStream
from psjob.wire.frame import Header, Kind, WireError, run_digest

FILE: Final = "stage-cuts.json"
MOST_BYTES: Final = 1 << 20
log = logging.getLogger("psjob.shard")


class KeptCuts:
    """Of one run. `meet` may be called from any thread."""

    def __init__(self, place: Place, folder: Path) -> None:
        self._place, self._folder = place, folder
        self._lock = threading.Lock()

    def meet(self, stream: NonBlockingStream, header: Header, hello: Mapping[str, Any]) -> InOwnThread:
        """A worker asks which cuts were chosen; worker 0 tells some with its question. Raises WireError for a question out of shape.

        What is returned reads and writes files, so it is for a thread of its own.
        """
        stages, offer = len(self._place.config.stages.replicas), None
        if hello.get("role") != "worker":
            raise WireError(f"a {str(hello.get('role'))[:40]} asks for cuts, which workers do")
        if not stages:
            raise WireError(f"worker {header.worker} asks for cuts, and this job has no stages")
        if "cuts" in hello:
            if header.worker != 0:
                raise WireError(f"worker {header.worker} chooses cuts, which worker 0 does")
            try:
                offer = ChosenCuts.from_json(hello, stages)
            except ValueError as error:
                raise WireError(f"worker 0: {error}") from None
        return partial(self._answer, stream, offer)

    def _answer(self, stream: NonBlockingStream, offer: ChosenCuts | None) -> None:
        head = Header(Kind.WELCOME, run=run_digest(self._place.run), view=self._place.view, attempt=self._place.number)
        try:
            with self._lock:
                kept = self.kept()
                if kept is None and offer is not None:
                    self._keep(offer)
                    kept = offer
        except (CheckpointProblem, Fenced) as problem:
            log.warning("the cuts of the stages are not kept yet: %s", problem)
            raise WireError(f"shard 0 cannot keep the cuts yet: {problem}") from None
        stream.send_json(head, {} if kept is None else kept.to_json())

    def kept(self) -> ChosenCuts | None:
        """What was chosen for this run. Raises CheckpointProblem where that cannot be read."""
        try:
            os.stat(self._folder / FILE)
        except FileNotFoundError:
            return None
        except OSError as error:  # it may be there: other cuts must not take its place
            raise explain(error, f"look for {FILE}", self._folder) from error
        raw = disk.read_small(self._folder / FILE, MOST_BYTES)
        try:
            found = json.loads(raw)
            return ChosenCuts.from_json(found, len(self._place.config.stages.replicas)) if found["run"] == self._place.run else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointProblem(
                f"{FILE} in {self._folder} does not hold the cuts of this job ({error}); name the cuts in the manifest"
            ) from None

    def _keep(self, chosen: ChosenCuts) -> None:
        view, owner = self._place.view, None
        claim.check(self._folder, view, owner)
        disk.write_whole(self._folder, FILE, [json.dumps({"run": self._place.run, **chosen.to_json()}).encode()])
        claim.check(self._folder, view, owner)
        log.info("%s", chosen.told(self._place.config.stage_names))
