"""The sentences a user meets, and how a process leaves with one.

Of an error that nobody catches a script's author sees the lines of the script and of torch, and what to do about it:

- An error of a dataset, a sampler or a collate function comes through psjob's loader. One that psjob raises for a wrong argument ends in
  psjob. Of both psjob's own lines are left out. An error that psjob did not mean to raise keeps all lines.
- What a script has left in of DDP or Horovod is named below the error that it makes: psjob starts no process group, and wraps no model.

`package_folders` are the folders of packages that a script imports and did not write: what is defined there is not the script's.
"""

from __future__ import annotations

import atexit
import dis
import importlib.util
import json
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

from psjob import contract

LONGEST_MESSAGE = 2048
"""Bytes of a termination message."""
_REFUSED = '"refused": true'
"""In the message of a process whose exit status is not the worker's."""


class Refused(Exception):
    """What the script or the environment asks cannot be done, and starting again would not help. The text says what to change.

    Outside a job it is raised, in a notebook and in a test too. In a job the process prints the text and ends with status 77.

    Example:
        >>> import psjob as ps
        >>> try:
        ...     ps.epochs(-1)
        ... except ps.Refused as refused:
        ...     print(refused)
        ps.epochs takes a number of epochs, such as ps.epochs(10), or nothing; got -1
    """

    __module__ = "psjob"


class Fenced(Exception):
    """A newer process has taken this one's place."""

    def __init__(self, message: str, term: int = 0) -> None:
        super().__init__(message)
        self.term = term


def leave_message(body: dict[str, object], again: bool = False) -> None:
    """Write the termination message that the planner reads; silently nothing where there is no such file, and outside a job.

    A refusal stays, but for another one of the same process (`again`): what a parent does then, or a sibling, follows from it.
    """
    path = os.environ.get(contract.ENV_TERMINATION_LOG, contract.TERMINATION_LOG if contract.ENV_ROLE in os.environ else "")
    raw = json.dumps(body)
    while len(raw) > LONGEST_MESSAGE and len(body) > 1:
        body = dict(list(body.items())[:-1])  # the first says most
        raw = json.dumps(body)
    data = raw.encode()
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not again and _REFUSED.encode() in os.pread(file, LONGEST_MESSAGE, 0):
                return
            # Another thread may end this process at any line: what is there is whole then, an earlier message or this one.
            os.pwrite(file, data.ljust(os.fstat(file).st_size), 0)
            os.ftruncate(file, len(data))
        finally:
            os.close(file)
    except OSError:
        pass


_ends_refused = False
_ends_as = 0
_is_of_a_script = False


def end_at_second_refusal() -> None:
    """This process runs a script of a job and nothing else: a second refusal ends it at once, since the script has caught the first."""
    global _is_of_a_script
    _is_of_a_script = True


@atexit.register  # as one of the last: other handlers, which were registered later, have run
def _end_refused() -> None:
    """The process of a job that was refused ends with EXIT_REFUSED, whatever its script has caught; or as `set_exit_status` says."""
    status = contract.EXIT_REFUSED if _ends_refused and contract.ENV_ROLE in os.environ else _ends_as
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def set_exit_status(status: int) -> None:
    """After its exit handlers this process ends with this status, and at once: what libraries do after those is left out."""
    global _ends_as
    _ends_as = status


def exit_refused(message: str) -> NoReturn:
    """Print the sentence, leave it for the planner and end this process with EXIT_REFUSED."""
    global _ends_refused
    __tracebackhide__ = True
    if _ends_refused and _is_of_a_script:
        _end_refused()
    at = users_line()
    message = f"{message} ({at})" if at else message
    print(f"psjob: {message}", file=sys.stderr, flush=True)
    before, _ends_refused = _ends_refused, True
    # A launcher, a parent or a test runner ends with a status of its own.
    leave_message({"error": message[: LONGEST_MESSAGE // 4], "refused": True}, again=before)
    raise SystemExit(contract.EXIT_REFUSED) from None


def refuse(message: str) -> NoReturn:
    """Refuse what the script asks: in a process of a job as by `exit_refused`, which the planner relies on; elsewhere raise Refused."""
    __tracebackhide__ = True
    if contract.ENV_ROLE in os.environ:
        exit_refused(message)
    shorten_errors()
    raise Refused(message) from None


def users_line() -> str:
    """If the script is, such as `train.py:12`: the innermost line that is its own; empty in a thread without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen", *package_folders())):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@contextmanager
def refused_after(seconds: float, message: str) -> Iterator[None]:
    """Foreign code runs inside, in this thread: where it does not come back in time, the process ends as by `exit_refused`."""

    def end() -> None:
        try:
            exit_refused(message)
        finally:
            os._exit(contract.EXIT_REFUSED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_LOADER: Final = os.path.join("torch", "utils", "data", "")
"""Between psjob's lines and those of a dataset lie these."""
_MEANT: Final = ("__init__.py", "api", "embeddings", "pipeline", "collectives")
"""Parts of psjob whose functions scripts call."""


def shorten_errors() -> None:
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
    return entry.tb_frame.f_code.co_filename.startswith(HERE)


def _is_of_script(entry: TracebackType) -> bool:
    return not entry.tb_frame.f_code.co_filename.startswith(("<frozen", *package_folders()))


def _is_of_loader(entry: TracebackType) -> bool:
    return _LOADER in entry.tb_frame.f_code.co_filename


def _is_meant(error: BaseException, entry: TracebackType) -> bool:
    """Did psjob raise this error for what the script has given?"""
    if type(error).__module__ == "psjob":
        return True
    code = entry.tb_frame.f_code
    package = code.co_filename.removeprefix(HERE).partition("/")[0]
    raised = 0 <= entry.tb_lasti < len(code.co_code) and dis.opname[code.co_code[entry.tb_lasti]] == "RAISE_VARARGS"
    return package in _MEANT and raised and type(error).__module__ == "builtins" and not isinstance(error, AssertionError)


def _shorten_text(error: BaseException) -> None:
    """Of an error of a loader process torch gives the traceback as text."""
    if not error.args or not isinstance(text := error.args[0], str) or HERE not in text:
        return
    kept, leaving = [], False
    for line in text.splitlines():
        if line.startswith('  File "'):
            leaving = HERE in line
        elif not line.startswith("    "):
            leaving = False
        if not leaving:
            kept.append(line)
    error.args = ("\n".join(kept), *error.args[1:])


NO_GROUP: Final = (
    "environment variable RANK expected",
    "environment variable WORLD_SIZE expected",
    "process group has not been initialized",
)
"""What torch says where nobody has started one."""
HOROVOD: Final = "horovod"
OF_DDP: Final = {
    "no_sync": "calls no_sync of DistributedDataParallel. psjob sends gradients at step() only; take the with statement off its body",
    "module": "asks for the module that DistributedDataParallel has wrapped. psjob wraps none; take .module out",
    "set_epoch": "calls set_epoch of DistributedSampler. Each pass of psjob.shard is the next epoch; take it out",
}
"""What a script did to what DDP has made of its model and its sampler, by the attribute."""
_MARK: Final = "psjob_tells_what_is_left_in"


def add_hints() -> None:
    """From now on an error that ends this process is followed by what to do about it, if it is one of these."""
    hook = sys.excepthook
    if hasattr(hook, _MARK):
        return

    def on_error(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        hook(kind, value, trace)
        if found := hint(value, trace):
            print(f"psjob: {found}", file=sys.stderr, flush=True)

    setattr(on_error, _MARK, True)
    sys.excepthook = on_error


def hint(error: BaseException, trace: TracebackType | None) -> str:
    """One sentence with the script's file and line; empty for any other error."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == HOROVOD:
        what = "imports Horovod"
    elif isinstance(error, ValueError | RuntimeError) and any(words in str(error) for words in NO_GROUP):
        what = "needs a process group of torch.distributed"
    elif isinstance(error, AttributeError) and error.name in OF_DDP and _is_of_torch(error.obj):
        return f"{_line_of(trace)} {OF_DDP[error.name]}"
    else:
        return ""
    at = _line_of(trace)
    file = at.rpartition(":")[0]
    return f"{at} {what}, and psjob starts none: workers find the shards by themselves; take it out (psjob convert {file} shows the edits)"


def _is_of_torch(thing: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.nn.Module | torch.utils.data.Sampler)


def _line_of(trace: TracebackType | None) -> str:
    """The innermost line of the script, such as `train.py:12`."""
    own = [entry for entry in _entries(trace) if _is_of_script(entry)]
    file, at = (own[-1].tb_frame.f_code.co_filename, own[-1].tb_lineno) if own else (sys.argv[0], 0)
    return f"{file.removeprefix(f'{os.getcwd()}{os.sep}')}:{at}"


HERE: Final = f"{Path(__file__).parents[1]}/"


@cache
def package_folders() -> tuple[str, ...]:
    """Folders, each with a slash at its end: Python's own, an environment's, the system's, the user's, and what pip has filled besides.

    That may be a folder of PYTHONPATH, for torch too. If the script lies in it, it is the script's, and only torch in it is not.
    """
    found = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    found += site.getsitepackages() if hasattr(site, "getsitepackages") else []
    found += [site.getusersitepackages()] if hasattr(site, "getusersitepackages") else []
    found += [place for place in sys.path if not _may_hold_script(Path(place)) and any(Path(place).glob("*.dist-info"))]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        torch = Path(spec.origin).parent
        found.append(str(torch if _may_hold_script(torch.parent) else torch.parent))
    return HERE, *dict.fromkeys(f"{Path(place)}/" for place in found)


def _may_hold_script(folder: Path) -> bool:
    """May the script lie in it?"""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = [Path.cwd(), *(Path(name).absolute() for name in (sys.path[0], file) if name)]
    return any(each.is_relative_to(folder.absolute()) for each in script)
