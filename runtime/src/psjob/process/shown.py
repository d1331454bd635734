"""What Python shows of an error that nobody catches: psjob's own lines are left out if the error is the script's.

An error of a dataset, a sampler or a collate function comes through psjob's loader. One that psjob raises for a wrong argument ends in
psjob. Of both a script's author needs the lines of the script and of torch. An error that psjob did not mean to raise keeps all lines.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from psjob.process import installed

_LOADER: Final = os.path.join("torch", "utils", "data", "")
"""Between psjob's lines and those of a dataset lie these."""
_MEANT: Final = ("__init__.py", "api", "embeddings", "pipeline", "collectives")
"""Parts of psjob whose functions scripts call."""


def install() -> None:
    """From now on errors are shown so, by whatever shows them today."""
    if getattr(sys.excepthook, "shortens", False):
        return
    shown = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        shown(kind, value, shorten(value, trace))

    show.shortens = True  # type: ignore[attr-defined]
    sys.excepthook = show


def shorten(error: BaseException, trace: TracebackType | None = None) -> TracebackType | None:
    """Leave psjob's lines out of the traceback of an error and of those that led to it; `trace` is the error's own, if it has none."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        _shorten_text(at)
        at.__traceback__ = _without(at, at.__traceback__ or (trace if at is error else None))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return error.__traceback__


def _without(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    every = list(_entries(trace))
    own = [_is_own(entry) for entry in every]
    last = max((at for at, entry in enumerate(every) if not own[at] and (_is_of_script(entry) or _is_of_loader(entry))), default=-1)
    ends_here = bool(own) and own[-1] and _is_meant(error, every[-1])
    kept = [entry for at, entry in enumerate(every) if not own[at] or (at > last and not ends_here)]
    following: TracebackType | None = None
    for entry in reversed(kept):
        entry.tb_next, following = following, entry
    return following


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(installed.HERE)


def _is_of_script(entry: TracebackType) -> bool:
    return not entry.tb_frame.f_code.co_filename.startswith(("<frozen", *installed.places()))


def _is_of_loader(entry: TracebackType) -> bool:
    return _LOADER in entry.tb_frame.f_code.co_filename


def _is_meant(error: BaseException, entry: TracebackType) -> bool:
    """Did psjob raise this error for what the script has given?"""
    if type(error).__module__ == "psjob":
        return True
    code = entry.tb_frame.f_code
    package = code.co_filename.removeprefix(installed.HERE).partition("/")[0]
    raised = 0 <= entry.tb_lasti < len(code.co_code) and dis.opname[code.co_code[entry.tb_lasti]] == "RAISE_VARARGS"
    return package in _MEANT and raised and type(error).__module__ == "builtins" and not isinstance(error, AssertionError)


def _shorten_text(error: BaseException) -> None:
    """Of an error of a loader process torch gives the traceback as text."""
    if not error.args or not isinstance(text := error.args[0], str) or installed.HERE not in text:
        return
    kept, leaving = [], False
    for line in text.splitlines():
        if line.startswith('  File "'):
            leaving = installed.HERE in line
        elif not line.startswith("    "):
            leaving = False
        if not leaving:
            kept.append(line)
    error.args = ("\n".join(kept), *error.args[1:])
