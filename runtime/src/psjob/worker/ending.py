"""How a script's turn in a job ends."""

from __future__ import annotations

from psjob import contract


class SessionEnd(BaseException):
    """The script's turn is over. `how`: rewind, finished, left, stopped, refused, lost. A rewind's `message`: the mode to come back in."""

    def __init__(self, how: str, message: str = "") -> None:
        super().__init__(message or how)
        self.how, self.message = how, message


EXIT_OF = {"finished": contract.EXIT_DONE, "left": contract.EXIT_DONE, "stopped": contract.EXIT_RETRY, "lost": contract.EXIT_RETRY,
           "fenced": contract.EXIT_FENCED, "refused": contract.EXIT_REFUSED}  # fmt: skip
"""Exit status for each ending; a rewind has none, it execs."""
