"""Which term a run's folder belongs to: CLAIM-<term>, created once, never written again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from pathlib import Path

from psjob.checkpoint import disk
from psjob.checkpoint.disk import CheckpointProblem, explain_os_error
from psjob.contract import MOST_NUMBER
from psjob.process.errors import Fenced

_NAME = re.compile(r"CLAIM-(\d{6,18})")
MAX_OWNER = 512
RESERVE = "claim-reserve"
RESERVE_BYTES = 16384
"""Room for a claim and what a file system needs beside it."""


def claim_term(folder: Path, term: int, owner: str) -> bool:
    """Claim `term` for the pod `owner`, durably; True when new, False when it was ours already.

    Creates the folder where absent. Raises Fenced if a higher term is claimed, or this one by another; CheckpointProblem
    where the folder cannot be written.
    """
    disk.make_folder(folder)
    check_claim(folder, term, owner)
    body = json.dumps({"view": term, "owner": owner}).encode()
    try:
        new = _create(folder, term, body)
    except CheckpointProblem as problem:
        if not problem.full or not _release(folder):
            raise
        new = _create(folder, term, body)
    if new:
        disk.sync_folder(folder)
    check_claim(folder, term, owner)
    _reserve(folder)
    return new


def _create(folder: Path, term: int, body: bytes) -> bool:
    """Write the claim; False where there is one. One that was not written whole is removed: it would be nobody's."""
    path = folder / _file(term)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    except OSError as error:
        raise explain_os_error(error, f"create {path.name}", folder) from error
    try:
        if _write(fd, body) != len(body):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise explain_os_error(error, f"write {path.name}", folder) from error
    finally:
        os.close(fd)
    return True


def _write(fd: int, body: bytes) -> int:
    return os.write(fd, body)


def _reserve(folder: Path) -> None:
    """Keep room for the next claim, so that a run which has filled its volume can be taken over. If there is none now, later."""
    path = folder / RESERVE
    if path.exists():
        return
    with contextlib.suppress(CheckpointProblem):
        disk.write_whole(folder, RESERVE, [bytes(RESERVE_BYTES)])


def _release(folder: Path) -> bool:
    """Give the reserved room back; False where none is reserved."""
    try:
        os.unlink(folder / RESERVE)
    except OSError:
        return False
    return True


def check_claim(folder: Path, term: int, owner: str | None = None) -> None:
    """Raise Fenced if a higher term than `term` is claimed, or `term` itself by another pod than `owner`."""
    found = highest(folder)
    if found is None or found[0] < term:
        return
    if found[0] > term:
        raise Fenced(f"term {found[0]} of this run is claimed by {found[1] or 'another pod'}; this is term {term}", found[0])
    if owner is not None and found[1] != owner:
        raise Fenced(f"term {term} of this run is claimed by {found[1] or 'another pod'}; this is {owner}", term)


def highest(folder: Path) -> tuple[int, str] | None:
    """(term, owner) of the highest claim, or None. The owner is empty where its process died while claiming."""
    try:
        named = (int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))
        terms = [term for term in named if term <= MOST_NUMBER]  # no process has a higher one: such a file is a stranger's
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain_os_error(error, "list the folder", folder) from error
    if not terms:
        return None
    return max(terms), _owner(folder / _file(max(terms)))


def remove_older_claims(folder: Path, term: int) -> None:
    """Remove claims below `term` once it is claimed itself: nobody looks at any but the highest. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        for name in names if _file(term) in names else ():
            match = _NAME.fullmatch(name)
            if match is not None and int(match[1]) < term:
                os.unlink(folder / name)


def _file(term: int) -> str:
    return f"CLAIM-{term:06d}"


def _owner(path: Path) -> str:
    try:
        body = json.loads(disk.read_small(path, 4096))
    except (CheckpointProblem, ValueError, RecursionError):
        return ""
    owner = body.get("owner") if isinstance(body, dict) else None
    return owner[:MAX_OWNER] if isinstance(owner, str) else ""
