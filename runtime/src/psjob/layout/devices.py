"""What is asked of GPUs: whether a stream is being captured, where a model lies, whether it was moved, and whether a device is lost.

A captured CUDA graph holds kernels. Python runs once, while it is captured, and no hook is called as the graph is replayed. What reads a
value then ends the capture with an error of CUDA, so psjob looks at nothing meanwhile, and refuses what a replay would leave out.

After some errors a process can do nothing more with its device, whatever it tries. CUDA calls them sticky: only a new process helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

_SOURCES: Final = ("CUDA error", "HIP error")
"""Before the words of a driver stands one of these."""
_HARDWARE: Final = (
    "uncorrectable ECC error", "uncorrectable NVLink error", "fallen off the bus", "GPU is lost", "hardware stack error",
    "unspecified launch failure", "launch timed out", "external device", "busy or unavailable",
)  # fmt: skip
"""Words of errors after which the device itself is suspected."""
_KERNEL: Final = (
    "device-side assert", "illegal memory access", "illegal instruction", "misaligned address", "invalid program counter",
    "not supported on global/shared address space",
)  # fmt: skip
"""Words of errors that a kernel has made: the device is well, and this process cannot use it any more."""
_LONGEST: Final = 200
"""Characters of the driver's words."""


def capturing() -> bool:
    """Is the calling thread's current stream being captured? Begins no CUDA in a process that has not, nor in a fork."""
    # The first question is asked without a driver: torch raises at the second where there is none.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def in_capture(what: str, instead: str) -> str:
    """Why `what` is refused while a stream is captured, and what to do `instead`."""
    return (
        f"{what} was called while a CUDA graph is captured. A replay runs kernels only, so nothing of it would happen then. "
        f"Capture forward and backward only, and {instead}"
    )


@dataclass(frozen=True)
class LostDevice:
    """`words` are the driver's. `by_kernel`: a kernel has made the error, so that the script is suspected, and not the device."""

    words: str
    by_kernel: bool

    def fact(self, where: str) -> str:
        """What a status has room for: `where` is what `gpus_of` gave, and may be empty."""
        return f"{where or 'a GPU of this worker'} is lost: {self.words}"

    @property
    def step(self) -> str:
        """What to do about it, for the log."""
        if self.by_kernel:
            return "This process cannot use it any more, and a new one is started. CUDA_LAUNCH_BLOCKING=1 shows the line that asked for it"
        return "A new process is started. If it comes again, look for Xid in the node's kernel log, and take the node out of service"


def lost_device(said: BaseException | str) -> LostDevice | None:
    """What an error, those that led to it, or its text say of a device that this process cannot use any more; None: nothing."""
    for text in [said] if isinstance(said, str) else _texts(said):
        begin = next((at for source in _SOURCES if (at := text.find(source)) >= 0), -1)
        if begin < 0:
            continue
        words = text[begin:].splitlines()[0][:_LONGEST]
        for table in (_HARDWARE, _KERNEL):
            if any(word.lower() in words.lower() for word in table):
                return LostDevice(words, table is _KERNEL)
    return None


def _texts(error: BaseException) -> list[str]:
    """Of RuntimeErrors among an error and those that led to it. What a script has put into an error of its own class is not a driver's."""
    found: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, RuntimeError):
            found.append(str(at))
        at = at.__cause__ or at.__context__
    return found


def gpus_of(tensors: Iterable[torch.Tensor]) -> str:
    """The GPUs on which these lie, such as `cuda:0 (NVIDIA H200, GPU-7c…)`; empty if there are none."""
    return " or ".join(named(device) for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))


def named(device: torch.device) -> str:
    """One of these; empty for a device that is no GPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return f"{device} ({properties.name}{f', GPU-{uuid}' if uuid else ''})"


Kind = tuple[torch.dtype, torch.device]
"""Of a parameter."""


def kind(tensor: torch.Tensor) -> Kind:
    """As it is now."""
    return tensor.dtype, tensor.device


ROWS: Final = 512
"""Parameters that one look reads. Of more the looks take turns."""


class Placement:
    """What and where the parameters of a model were when this was made. `names` are theirs, by row of the table."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names, self._parameters = names, parameters
        self._before = [kind(p) for p in parameters]
        self._next = 0

    def moved(self, all_of_them: bool = False) -> str:
        """Which parameter was moved or cast since, for a sentence; empty: none of those that are looked at this time."""
        count = len(self._parameters)
        begin, end = (0, count) if all_of_them or count <= ROWS else (self._next, min(count, self._next + ROWS))
        self._next = end % count if count else 0
        return moved(self._names[begin:end], self._before[begin:end], [kind(p) for p in self._parameters[begin:end]])


def moved(names: Sequence[str], before: Sequence[Kind], now: Sequence[Kind]) -> str:
    """Which parameter is not where, or what, it was at attach, for a sentence; empty: all are. By row of the table.

    Parameters without memory (meta) come to have some as a stage is built, and are passed over.
    """
    if before == now:
        return ""
    others = [row for row, (then, at) in enumerate(zip(before, now, strict=True)) if then != at and then[1].type != "meta"]
    if not others:
        return ""
    first = others[0]
    more = f" (one of {len(others)})" if others[1:] else ""
    return f"parameter {names[first]} was {_kind(before[first])} at attach, and is {_kind(now[first])} now{more}"


MOVE_BEFORE: Final = "Move the model before attach: call .to(), .cuda(), .half() or .double() first, and psjob.attach after it"


def _kind(kind: Kind) -> str:
    dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')} on {device}"
