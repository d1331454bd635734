"""Files that a script reads before it trains, such as a snapshot that it continues from by itself.

psjob puts back what a script had, so one that is started again needs no snapshot. One of a later time leads it past its place. Then the
worker begins again, and files that it had not read the first time are left out. They are not there for the script until it stands at its
place, or has written them again.

Lines that run again do not write over a file. It has the weights of their first time.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from psjob import contract
from psjob.process.errors import exit_refused

MOST: Final = 64
"""Files that are noted, or left out: more are parts of a dataset."""
Read = dict[str, list[int]]
"""By absolute path, size in bytes and time of the last change in ns."""
_read: Read = {}
_left_out: set[str] = set()
_notes = False
_runs_again: Callable[[], bool] | None = None
_stat: Callable[..., os.stat_result] = os.stat


def note_reads(environ: Mapping[str, str]) -> None:
    """Note what this process reads from now on by `torch.load`, and leave out the files that its environment names."""
    global _notes
    import torch

    _read.clear()
    _left_out.clear()
    _notes = True
    try:
        _left_out.update(map(str, json.loads(environ.get(contract.ENV_LEFT_OUT) or "[]")))
    except (ValueError, TypeError):
        exit_refused(f"{contract.ENV_LEFT_OUT} is no list of files in JSON; a worker sets it for itself, so leave it out")
    if not hasattr(torch.load, MARK):
        torch.load, torch.save = _load_of(torch.load), _save_of(torch.save)
    os.stat = _stat_of_others if _left_out else _stat


MARK: Final = "_psjob_notes"


def _load_of(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def noting(f: Any, *words: Any, **named: Any) -> Any:
        if _notes or _left_out:
            _reads(f)
        return load(f, *words, **named)

    setattr(noting, MARK, True)
    return noting


def _save_of(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def once(obj: Any, f: Any, *words: Any, **named: Any) -> Any:
        path = _path(f)
        if path is not None:
            _left_out.discard(path)
        if isinstance(f, (str, os.PathLike)) and _runs_again is not None and _runs_again() and _is_there(f):
            return None  # it was written by the same lines, with the weights of then
        return save(obj, f, *words, **named)

    return once


def _is_there(path: Any) -> bool:
    try:
        return _stat(path).st_size > 0
    except (OSError, ValueError):
        return False


def _reads(file: Any) -> None:
    path = _path(file)
    if path is None:
        return
    if path in _left_out:
        exit_refused(
            f"{path} was written later than this worker's record, so it is left out after this restart. The script reads it without "
            "asking os.path.exists. Write `for epoch in ps.epochs(n)`, which continues at the right epoch wherever the script begins"
        )
    if _notes and len(_read) < MOST:
        try:
            found = _stat(path)
        except OSError:
            return
        _read[path] = [found.st_size, found.st_mtime_ns]


def _path(file: Any) -> str | None:
    """The absolute path of what is opened by its name, or was."""
    name = file if isinstance(file, os.PathLike) else getattr(file, "name", file)
    try:
        return os.path.abspath(os.fsdecode(name))
    except (TypeError, ValueError):  # one in memory, or known by its number
        return None


def _stat_of_others(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
    if _left_out and dir_fd is None and _path(path) in _left_out:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return _stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)


def follow_writes(runs_again: Callable[[], bool]) -> None:
    """`runs_again`: do lines run again that a process before has run? What they write by `torch.save` is there, as it was written then."""
    global _runs_again
    _runs_again = runs_again


def read_so_far() -> Read:
    """What was read so far, before the script began to train."""
    return dict(_read)


def begin_training() -> None:
    """The script trains from now on: what it reads is not noted."""
    global _notes
    _notes = False


def stand() -> None:
    """The script stands at its place: every file is there again."""
    _left_out.clear()
    os.stat = _stat


def other(than: Mapping[str, Collection[int]]) -> list[str]:
    """Files that were read here and not there, or have changed since; none where some are left out already, or there are too many."""
    found = [path for path, stamp in _read.items() if list(than.get(path, ())) != stamp]
    return [] if os.stat is not _stat or len(_read) == MOST else found
