"""What a command or a verb ends with when it cannot do what it was asked: one sentence with the next step.

`BadInput` is for what was typed or lies in a file, `JobProblem` for a job, a cluster or a deadline. The next step is a call for who called
from Python, and a command for who typed one: a sentence holds both as a `Step`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from psjob_operator.contract import INSTALL

NEAR = 3


@dataclass(frozen=True)
class Step:
    """What to do next, in the words of Python and of a terminal."""

    python: str
    terminal: str


def verb_step(verb: str, name: str = "", namespace: str | None = None) -> Step:
    """A verb that clients and the command line share, of a job or of all."""
    given = json.dumps(name) if name else ""
    words = " ".join(filter(None, ("psjob", verb, name, f"-n {namespace}" if namespace else "")))
    return Step(f"`client.{verb}({given})`", f"`{words}`")


class JobProblem(Exception):
    """A job, a cluster or a deadline stands in the way; the text is one sentence for people, with what to do next.

    Example:
        >>> import psjob
        >>> try:
        ...     psjob.Client.local().get("nothing")
        ... except psjob.JobProblem as problem:
        ...     print(repr(problem.in_terminal[:28]))
        'there is no job "nothing" in'
    """

    __module__ = "psjob"

    def __init_subclass__(cls) -> None:
        """A traceback names it as users import it."""
        if cls.__module__.startswith("psjob_client."):
            cls.__module__ = JobProblem.__module__

    def __init__(self, *parts: str | Step) -> None:
        super().__init__(*parts)

    def __str__(self) -> str:
        return "".join(part if isinstance(part, str) else part.python for part in self.args)

    @property
    def in_terminal(self) -> str:
        """The same for who typed a command."""
        return "".join(part if isinstance(part, str) else part.terminal for part in self.args)


class NoSuchJob(JobProblem):
    """There is no job of that name."""


class Unreachable(JobProblem):
    """The cluster gives no answer, or there is no way to it."""


class NotAllowed(JobProblem):
    """The cluster refuses this user."""


class NotServed(JobProblem):
    """The cluster does not know PSTrainingJob."""


class Conflict(JobProblem):
    """The job is not in a state in which that can be done."""


class BadManifest(JobProblem):
    """The manifest that was asked for is not valid; a line a problem."""


class JobFailed(JobProblem):
    """The job that was waited for has failed."""


class DeadlinePassed(JobProblem):
    """What was waited for did not come in time."""


class NoWeights(JobProblem):
    """The job has no weights to load, or they cannot be read."""


def no_such_job(name: str, where: str, known: Iterable[str], listing: Step) -> NoSuchJob:
    """`there is no job "digit" in …; did you mean digits?`; `listing` is what shows all."""
    near = difflib.get_close_matches(name, list(known), n=NEAR, cutoff=0.5)
    start = f'there is no job "{name}" in {where}; '
    if near:
        return NoSuchJob(f"{start}did you mean {' or '.join(near)}?")
    return NoSuchJob(start, listing, " shows those that are there")


class BadInput(Exception):
    """A manifest, option or folder that cannot be used. `lines`: one sentence a problem, each with its remedy."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines: Sequence[str] = lines


def must_be_installed(command: str) -> None:
    """Raises BadInput if `command` finds no library in this environment."""
    if find_spec("psjob") is None:
        raise BadInput(f"{command} needs psjob's library beside it; install it into the same environment, {INSTALL}")
