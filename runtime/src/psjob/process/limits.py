"""Open files: as many as the system lets this process have, and a refusal where they cannot be enough."""

from __future__ import annotations

import resource

from psjob.process.errors import Refused

OWN_FILES = 640
"""Descriptors that a shard needs beside its streams: files, listeners, status requests, handovers of memory, and strangers."""


def open_files(workers: int, streams: int, shards: int) -> int:
    """Raise RLIMIT_NOFILE to its hard limit; the limit then. Raises Refused where a shard of such a job needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # some systems have a ceiling below an infinite hard limit
    needed = workers * streams + shards + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise Refused(
            f"this process may open {soft} files (RLIMIT_NOFILE), and {workers} workers with {streams} streams each need {needed}: "
            "raise the hard limit of the container runtime, or use fewer workers or streams"
        )
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
