"""The API server's history: resourceVersions only rise, unless its data was restored from a backup.

A watch then waits for what was lost, without an error, and lists look older than what is known. So the process ends, to begin anew.
"""

from __future__ import annotations


def onward(newest: int, version: int, what: str) -> int:
    """The higher of both, which is `version`, of a consistent read. Raises RuntimeError where it has gone back; `what` was read."""
    if version < newest:
        back = f"the resourceVersion of {what} is {version} and was {newest}"
        raise RuntimeError(f"the API server was restored from a backup: {back}; this process ends, to read all anew")
    return version
