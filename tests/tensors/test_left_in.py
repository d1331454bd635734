"""What torch and Python say of a process group or Horovod that was left in, and what is told below it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from psjob.process import tracebacks


def group() -> None:
    torch.distributed.init_process_group("gloo")


def wrapper() -> None:
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))


def sampler() -> None:
    torch.utils.data.DistributedSampler([1, 2])


def reduced() -> None:
    torch.distributed.all_reduce(torch.ones(1))


def gathered() -> None:
    with torch.nn.Linear(1, 1).no_sync():  # type: ignore[operator,union-attr]
        pass


def unwrapped() -> None:
    torch.nn.Linear(1, 1).module.state_dict()  # type: ignore[operator,union-attr]


def epoch_of_a_sampler() -> None:
    torch.utils.data.RandomSampler([1]).set_epoch(1)  # type: ignore[attr-defined]


def own_module() -> None:
    object().module  # type: ignore[attr-defined] # noqa: B018


def horovod() -> None:
    __import__("horovod.torch")


def own_value() -> None:
    raise ValueError("batch of 3")


def other_module() -> None:
    __import__("no_such_module")


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (group, "needs a process group of torch.distributed"),
        (wrapper, "needs a process group of torch.distributed"),
        (sampler, "needs a process group of torch.distributed"),
        (reduced, "needs a process group of torch.distributed"),
        (own_module, ""),
        (horovod, "imports Horovod"),
        (own_value, ""),
        (other_module, ""),
    ],
)
def test_the_scripts_line_is_named(monkeypatch: pytest.MonkeyPatch, script: Callable[[], None], what: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Exception) as caught:
        script()
    trace = caught.value.__traceback__
    assert trace is not None
    found = tracebacks.hint(caught.value, trace.tb_next)
    assert (f"test_left_in.py:{script.__code__.co_firstlineno + 1} {what}, and psjob starts none" in found) == bool(what)
    assert bool(found) == bool(what) and ("psjob convert" in found) == bool(what)


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        (gathered, "take the with statement off its body"),
        (unwrapped, "take .module out"),
        (epoch_of_a_sampler, "the next epoch; take it out"),
    ],
)
def test_what_ddp_has_made_of_a_model_is_named(script: Callable[[], None], remedy: str) -> None:
    with pytest.raises(AttributeError) as caught:
        script()
    trace = caught.value.__traceback__
    assert trace is not None
    found = tracebacks.hint(caught.value, trace.tb_next)
    assert f"test_left_in.py:{script.__code__.co_firstlineno + 1} " in found and found.endswith(remedy)


def test_the_hook_is_set_once_and_tells_after_the_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: print("the error", file=sys.stderr))
    tracebacks.add_hints()
    hook = sys.excepthook
    tracebacks.add_hints()
    assert sys.excepthook is hook
    try:
        horovod()
    except ImportError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook(ValueError, ValueError("batch of 3"), None)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == said[2] == "the error" and said[1].startswith("psjob: ") and len(said) == 3
