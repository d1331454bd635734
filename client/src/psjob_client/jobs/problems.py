"""What a verb ends with when it cannot do what it was asked: one sentence with the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 3


class JobProblem(Exception):
    """A job, a cluster or a deadline stands in the way; the text is one sentence for people, with what to do next."""


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


class JobFailed(JobProblem):
    """The job that was waited for has failed."""


class DeadlinePassed(JobProblem):
    """What was waited for did not come in time."""


def no_such_job(name: str, where: str, known: Iterable[str], listing: str) -> NoSuchJob:
    """`there is no job "digit" in …; did you mean digits?`; `listing` is the command that shows all."""
    near = difflib.get_close_matches(name, list(known), n=NEAR, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"`{listing}` shows those that are there"
    return NoSuchJob(f'there is no job "{name}" in {where}; {hint}')
