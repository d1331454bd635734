"""What a script has left in of DDP or Horovod, told below the error that it makes: psjob starts no process group, and wraps no model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from psjob.process import installed

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


def begin() -> None:
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
        return f"{_place(trace)} {OF_DDP[error.name]}"
    else:
        return ""
    at = _place(trace)
    file = at.rpartition(":")[0]
    return f"{at} {what}, and psjob starts none: workers find the shards by themselves; take it out (psjob convert {file} shows the edits)"


def _is_of_torch(thing: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.nn.Module | torch.utils.data.Sampler)


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the script, such as `train.py:12`."""
    place = None
    for frame, line in _frames(trace):
        if not frame.f_code.co_filename.startswith(("<frozen", *installed.places())):
            place = frame.f_code.co_filename, line
    file, at = place or (sys.argv[0], 0)
    return f"{file.removeprefix(f'{os.getcwd()}{os.sep}')}:{at}"


def _frames(trace: TracebackType | None) -> Iterator[tuple[Any, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
