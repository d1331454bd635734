"""What a GPU asks of a script: what may be captured, what a move is told as, which errors say that a device is lost.

There is no GPU here. A stand-in answers torch's two questions about captures, so that what follows from the answers is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api.consistency import FirstInputs
from psjob.api.script_changes import LOST, UNCLIPPED, LeftGradients
from psjob.layout import devices, memory
from psjob.layout.devices import Kind, Placement, lost_device, moved

ACCELERATOR = getattr(torch, "AcceleratorError", RuntimeError)
CPU, FIRST, SECOND, META = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "meta"))
PLAIN: Kind = (torch.float32, CPU)
ON_FIRST: Kind = (torch.float32, FIRST)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether the current stream is being captured."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])

    def say(yes: bool) -> None:
        now[0] = yes

    return say


def test_without_a_gpu_nothing_is_captured_and_cuda_is_not_begun() -> None:
    """Torch's own question raises where it was built with CUDA and there is no driver."""
    before = torch.cuda.is_initialized()
    assert devices.capturing() is False and torch.cuda.is_initialized() == before


MOVED: list[tuple[list[Kind], list[Kind], str]] = [
    ([PLAIN, PLAIN], [PLAIN, PLAIN], ""),
    ([PLAIN, PLAIN], [ON_FIRST, ON_FIRST], "parameter a was float32 on cpu at attach, and is float32 on cuda:0 now (one of 2)"),
    ([ON_FIRST, ON_FIRST], [ON_FIRST, PLAIN], "parameter b was float32 on cuda:0 at attach, and is float32 on cpu now"),
    ([ON_FIRST], [(torch.float32, SECOND)], "parameter a was float32 on cuda:0 at attach, and is float32 on cuda:1 now"),
    ([PLAIN, PLAIN], [(torch.float16, CPU), PLAIN], "parameter a was float32 on cpu at attach, and is float16 on cpu now"),
    ([(torch.float32, META), PLAIN], [PLAIN, PLAIN], ""),
    ([(torch.float32, META), PLAIN], [PLAIN, ON_FIRST], "parameter b was float32 on cpu at attach, and is float32 on cuda:0 now"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "now", "told"), MOVED)
def test_a_move_is_told_by_name_and_place(before: list[Kind], now: list[Kind], told: str) -> None:
    assert moved(["a", "b"][: len(before)], before, now) == told


def test_of_many_parameters_each_look_takes_its_part() -> None:
    count = 2 * devices.ROWS + 1
    parameters = [torch.zeros(1) for _ in range(count)]
    placement = Placement([f"p{row}" for row in range(count)], parameters)
    assert [placement.moved() for _ in range(4)] == [""] * 4
    parameters[-1].data = parameters[-1].data.double()
    found = [bool(placement.moved()) for _ in range(6)]
    assert sum(found) == 2 and found[:3].count(True) == 1, "once in three looks"
    assert placement.moved(all_of_them=True).startswith(f"parameter p{count - 1} was float32")


HARDWARE = [
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: hardware stack error",
    "CUDA error: GPU has fallen off the bus",
    "HIP error: unspecified launch failure",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
]
KERNEL = [
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: misaligned address",
]
OTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    ValueError("CUDA error: unspecified launch failure"),
    KeyError("ECC"),
]


@pytest.mark.parametrize("words", [*HARDWARE, *KERNEL])
@pytest.mark.parametrize("kind", [ACCELERATOR, RuntimeError])
def test_a_lost_device_is_known_by_the_drivers_words(words: str, kind: type[Exception]) -> None:
    found = lost_device(kind(f"{words}\nCUDA kernel errors might be asynchronously reported at some other API call."))
    assert found is not None and found.words == words and found.by_kernel == (words in KERNEL)
    assert found.fact("cuda:0 (NVIDIA H200, GPU-1)") == f"cuda:0 (NVIDIA H200, GPU-1) is lost: {words}"
    assert ("CUDA_LAUNCH_BLOCKING=1" in found.step, "Xid" in found.step) == (found.by_kernel, not found.by_kernel)
    assert found.fact("").startswith("a GPU of this worker is lost")


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_other_errors_are_the_scripts_own(error: Exception) -> None:
    assert lost_device(error) is None


def test_an_error_that_follows_from_a_lost_device_tells_of_it() -> None:
    """A framework tidies up, and that fails too; a thread's error is known by its text."""
    try:
        try:
            raise ACCELERATOR(HARDWARE[0])
        finally:
            raise KeyError("teardown")
    except KeyError as error:
        found = lost_device(error)
    assert found is not None and found.words == HARDWARE[0]
    told = lost_device(f"thread lane 0 failed: AcceleratorError: {HARDWARE[1]} (staging.py:1 take)")
    assert told is not None and told.words.startswith(HARDWARE[1])


def test_a_capture_postpones_the_look_at_first_inputs(capture: Callable[[bool], None]) -> None:
    """Warm-up and capture make no look that reads; the first step outside does."""
    done: list[list[int]] = []
    model = nn.Linear(3, 1)
    looks = FirstInputs(model, done.append)

    def reads(*_given: Any, **_named: Any) -> None:
        raise AssertionError("a value was read while a stream was captured")

    capture(True)
    poison = torch.ones(2, 3)
    poison.to = poison.detach = reads  # type: ignore[method-assign, assignment]
    model(poison)
    looks.step()
    capture(False)
    for _ in range(15):
        model(torch.ones(2, 3))
        looks.step()
    assert len(done) == 1 and done[0][0] == 0 and len(set(done[0][1:])) == 1 and done[0][1] != 0


def backward(model: nn.Linear) -> None:
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("captured", [True, False])
def test_what_a_replay_writes_is_taken_for_fresh(capture: Callable[[bool], None], captured: bool) -> None:
    """A replay leaves the same tensor at the same version. Of an eager script that would be a gradient that nobody has cleared."""
    model = nn.Linear(3, 1)
    left = LeftGradients(list(model.parameters()), [0, 1])
    capture(captured)
    backward(model)
    capture(False)
    left.stepped(lambda _row: True, True)
    assert left.problem(lambda _row: True) == ("" if captured else UNCLIPPED)
    left.load_state_dict({"rows": [0, 1], "cleared": False})
    assert left.problem(lambda _row: True) == ("" if captured else LOST)
    model.zero_grad()
    backward(model)
    assert left.problem(lambda _row: True) == "", "made anew, outside of a capture"
    left.stepped(lambda _row: True, True)
    assert left.problem(lambda _row: True) == UNCLIPPED


def test_several_tensors_cross_in_one_copy_with_their_values() -> None:
    """Of any dtype and form: each begins at a multiple of its size."""
    given = [
        torch.tensor(True), torch.arange(5, dtype=torch.float16), torch.randn(3, 4).t(), torch.empty(0, 2), torch.tensor(7),
        torch.randn(2, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.float64), torch.ones(3, dtype=torch.uint8),
        torch.randn(3).to(torch.float8_e4m3fn), torch.randn(2, dtype=torch.bfloat16),
    ]  # fmt: skip
    found = memory.crossed(given)
    for one, other in zip(given, found, strict=True):
        assert memory.has_bytes(other) and one.dtype == other.dtype and one.shape == other.shape
        assert bytes(memory.view(other)) == bytes(memory.view(memory.contiguous_values(one)))
    assert memory.crossed([]) == []
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
