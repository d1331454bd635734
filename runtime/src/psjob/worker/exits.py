"""How a script's turn in a job ends: found out before its process has gone, or because the worker hangs.

An atexit handler is not told the exit status. A script that came to its end, that called `sys.exit` or that raised shows
what happened; one that raised SystemExit itself does not (`raise SystemExit(main())`, an `exit` bound before). For that one
the process forks: its child ends in its place, and the status is read from it.

A process of multiprocessing ends by finalizers, before Python 3.13 while its error is on its way and without atexit handlers. From then on
they run after it has noted its exit code.

A worker that hangs writes the stacks of its threads to its log and exits. Shard 0 tells a link's thread, which does it where the
interpreter runs. A thread that blocks in C and holds the interpreter lock keeps every Python thread from running. Then a thread of
faulthandler, which needs no lock, writes the stacks, and the planner ends the process. A process that is stopped (SIGSTOP) writes nothing.

A process that has lost its GPU ends as a failure of its own kind, in a limited time, and does not begin again in place. What libraries do
at their end may wait for the device forever.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dis
import faulthandler
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from psjob import contract
from psjob.process import errors, supervise
from psjob.process.errors import leave_message


class SessionEnd(BaseException):
    """The script's turn is over. `how`: rewind, finished, left, stopped, refused, lost. A rewind's `message`: the mode to come back in."""

    def __init__(self, how: str, message: str = "") -> None:
        super().__init__(message or how)
        self.how, self.message = how, message


EXIT_OF = {"finished": contract.EXIT_DONE, "left": contract.EXIT_DONE, "stopped": contract.EXIT_RETRY, "lost": contract.EXIT_RETRY,
           "fenced": contract.EXIT_FENCED, "refused": contract.EXIT_REFUSED}  # fmt: skip
"""Exit status for each ending; a rewind has none, it execs."""


CHILD_SECONDS = 30.0
KILL_SECONDS = 60.0
"""The agent of a worker of several processes ends them long before."""
CRASHED = 1
LAST = -100
"""After the finalizers of queues and pools, which may hold what is still to be sent."""


def watch_exit(concerned: Callable[[], bool], ended_well: Callable[[], None]) -> None:
    """Call `ended_well` at this process's end where its exit status is 0 and `concerned` says that it matters."""
    ExitWatch(concerned, ended_well)


def watch_thread(told: Callable[[BaseException], object]) -> None:
    """The script trains in this thread. An error that ends it ends the process, which would come to its own end as if nothing had been.

    `told` is called with it first.
    """
    own, hook = threading.get_ident(), threading.excepthook

    def on_error(of: threading.ExceptHookArgs) -> None:
        if of.exc_value is not None:
            errors.shorten(of.exc_value)
        hook(of)
        code = of.exc_value.code if isinstance(of.exc_value, SystemExit) else CRASHED
        if threading.get_ident() == own and code not in (0, None):
            if of.exc_value is not None:
                told(of.exc_value)
            finish(contract.EXIT_DEVICE_LOST if _lost else code if isinstance(code, int) else CRASHED)

    threading.excepthook = on_error


class ExitWatch:
    """The hooks of one process; forked copies of it say nothing."""

    def __init__(self, concerned: Callable[[], bool], ended_well: Callable[[], None]) -> None:
        self.concerned, self.ended_well = concerned, ended_well
        self.pid = os.getpid()
        self.frame = _outermost()
        self.said: int | None = None
        self.hook, self.leave = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self._on_error, self._on_exit  # type: ignore[assignment]
        if multiprocessing.parent_process() is None:
            atexit.register(self._at_exit)
        else:
            self.frame = _frame_of(multiprocessing.process.BaseProcess._bootstrap)  # type: ignore[attr-defined]
            multiprocessing.util.Finalize(None, self._at_child_exit, exitpriority=LAST)

    def _on_error(self, kind: Any, value: Any, trace: Any) -> None:
        self.said = CRASHED
        self.hook(kind, value, trace)

    def _on_exit(self, code: Any = None) -> None:
        self.said = 0 if code is None or code == 0 else CRASHED
        self.leave(code)

    def _at_exit(self) -> None:
        if os.getpid() != self.pid or not self.concerned():
            return
        if _returned(self.frame) or self.said == 0:
            self.ended_well()
        elif self.said is None:
            self._ask_child()

    def _at_child_exit(self) -> None:
        error = sys.exc_info()[1]
        if error is None:
            well = self.frame is None or self.frame.f_locals.get("exitcode") == 0
        else:
            well = isinstance(error, SystemExit) and error.code in (0, None)
        if well and os.getpid() == self.pid and self.concerned():
            self.ended_well()

    def _ask_child(self) -> None:
        """Let a fork end as this process would; comes back in the fork only."""
        _flush()
        child = os.fork()
        if child == 0:
            libc = ctypes.CDLL(None)
            # Threads of libraries are not in a fork: what runs after the interpreter's end could wait for them forever.
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
            return
        status = _wait(child)
        if status == 0:
            self.ended_well()
        finish(status)


class Terminations:
    """Notes whether a SIGTERM was answered by a handler of the script's own, not by `ours`.

    `signal.signal` and `signal.getsignal` stay what they are to the script. Handlers that were set by the copy of `signal.signal` that a
    module has taken before are not seen, but for one that is there when this is made.
    """

    def __init__(self, ours: Callable[..., Any]) -> None:
        self.met = False
        self._ours = ours
        self._set, self._get = signal.signal, signal.getsignal
        signal.signal, signal.getsignal = self._signal, self._getsignal  # type: ignore[assignment]
        there = self._get(signal.SIGTERM)
        if callable(there) and threading.current_thread() is threading.main_thread():
            self._set(signal.SIGTERM, self._noting(there))

    def _signal(self, number: Any, handler: Any) -> Any:
        own = self._noting(handler) if number == signal.SIGTERM and callable(handler) and handler is not self._ours else handler
        return _unwrapped(self._set(number, own))

    def _getsignal(self, number: Any) -> Any:
        return _unwrapped(self._get(number))

    def _noting(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        def note(number: int, frame: FrameType | None) -> Any:
            self.met = True
            return handler(number, frame)

        note.of_the_script = handler  # type: ignore[attr-defined]
        return note


def _unwrapped(handler: Any) -> Any:
    return getattr(handler, "of_the_script", handler)


def _frames() -> Iterator[FrameType]:
    """Those of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _outermost() -> FrameType | None:
    """The main thread's first frame that is the script itself; what runs it, if there is none."""
    frames = list(_frames())
    own = [frame for frame in frames if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"]
    return next(reversed(own or frames), None)


def _frame_of(function: Callable[..., Any]) -> FrameType | None:
    """The main thread's frame of that function."""
    return next((frame for frame in _frames() if frame.f_code is function.__code__), None)


def _returned(frame: FrameType | None) -> bool:
    """Did the frame come to its end? Its last instruction is a return, or what raised."""
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


def _wait(child: int) -> int:
    deadline = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else CRASHED
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(f"psjob: the script's end took more than {CHILD_SECONDS:.0f} s; it counts as a crash", file=sys.stderr)
    return CRASHED


def wait_for_the_agent(why: str = "") -> NoReturn:
    """A process of this worker has gone, or all begin again: the agent ends this one, unless that is long in coming."""
    if why:
        print(f"psjob: {why}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
    finish(contract.EXIT_RETRY)


def finish(status: int) -> NoReturn:
    """End now, with what was printed and without further handlers."""
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass


DEVICE_SECONDS = 30.0
"""For exit handlers of a process that has lost its GPU, and for copies from and to one that may be lost."""
XID = "Look for Xid in the node's kernel log"
_lost: tuple[str, str] | None = None
"""What was said of the GPU that is lost, and what to do about it."""


def note_lost_device(fact: str, step: str) -> None:
    """A GPU of this process is lost: this was seen by a call whose error goes no further."""
    global _lost
    _lost = _lost or (fact, step)


def lose_device(fact: str, step: str) -> None:
    """The script ends, since its GPU is lost. Its exit handlers run, for DEVICE_SECONDS at most; then it ends with EXIT_DEVICE_LOST."""
    note_lost_device(fact, step)
    errors.set_exit_status(contract.EXIT_DEVICE_LOST)
    _tell(fact, step)
    supervise.timer(DEVICE_SECONDS, finish, "end of a process without its GPU", contract.EXIT_DEVICE_LOST)


def end_device_lost(fact: str, step: str) -> NoReturn:
    """End this process now, since its GPU is lost."""
    _tell(fact, step)
    finish(contract.EXIT_DEVICE_LOST)


def end_if_device_lost() -> None:
    """If a GPU is lost, this process does not begin again in place: the planner starts a new one, and counts a failure."""
    if _lost is not None:
        end_device_lost(*_lost)


@contextlib.contextmanager
def device_answers(device: str) -> Iterator[None]:
    """What runs inside waits for `device` (empty: for none). This process ends if there is no answer in DEVICE_SECONDS."""
    if not device:
        yield
        return
    fact = f"{device} is lost: it has not answered for {DEVICE_SECONDS:g} s"
    timer = supervise.timer(DEVICE_SECONDS, end_device_lost, "waits for a GPU", fact, XID)
    try:
        yield
    finally:
        timer.cancel()


def _tell(fact: str, step: str) -> None:
    print(f"psjob: {fact}. {step}", file=sys.stderr, flush=True)
    leave_message({"error": fact})


REARM_SECONDS = 0.5
STDERR = 2


def watch_progress(step_timeout: float, over: threading.Event) -> None:
    """From now on, until `over`, write the stacks once the interpreter did not come to this thread for `step_timeout` seconds."""

    def rearm() -> None:
        while not over.is_set():
            faulthandler.dump_traceback_later(step_timeout, file=STDERR)
            over.wait(REARM_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    supervise.start_thread(rearm, "watchdog")


def end_hung(seconds: float | None) -> None:
    """Write every thread's stack to the log and end this process with EXIT_HUNG. Does not return."""
    limit = "" if seconds is None else f" (workers.progressDeadlineSeconds is {seconds:g})"
    sentence = f"this worker has made no step while others wait for it{limit}; the stacks of its threads are in its log"
    with contextlib.suppress(OSError, ValueError):
        print(f"psjob: {sentence}:", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
    leave_message({"error": sentence})
    os._exit(contract.EXIT_HUNG)
