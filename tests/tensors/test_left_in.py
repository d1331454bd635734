"""What torch and Python say of a process group or Horovod that was left in, and what is told below it.

- What several processes per worker do not go with is refused with a sentence that names it.
- What `psjob convert` knows of torchrun's options is what torchrun's own parser takes.
- Each row of the table of what does not go together is refused for a script and a job that ask for both, and for no job without.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from psjob.api import compatibility
from psjob.api.attachable import features_of
from psjob.api.compatibility import CLASHES, Clash, Features, refuse_clashes
from psjob.api.rule_choice import LrScaling
from psjob.modes.stages import Stages
from psjob.process import errors
from psjob.process.config import CheckpointConfig, CompressionConfig, Config, LocalConfig
from psjob.process.errors import Refused
from psjob_client.convert import launcher
from psjob_client.convert.draft import Converted, Wishes
from psjob_client.convert.sources import from_words


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
    found = errors.hint(caught.value, trace.tb_next)
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
    found = errors.hint(caught.value, trace.tb_next)
    assert f"test_left_in.py:{script.__code__.co_firstlineno + 1} " in found and found.endswith(remedy)


def test_the_hook_is_set_once_and_tells_after_the_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: print("the error", file=sys.stderr))
    errors.add_hints()
    hook = sys.excepthook
    errors.add_hints()
    assert sys.excepthook is hook
    try:
        horovod()
    except ImportError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook(ValueError, ValueError("batch of 3"), None)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == said[2] == "the error" and said[1].startswith("psjob: ") and len(said) == 3


JOB = Config("job", "run", "0", "sync", 0, None, 3, (), CheckpointConfig(1.0, None, 2, True, None), "AllWorkers", 10.0, 10.0, processes=2)


def test_libraries_that_would_make_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accelerate", "lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    compatibility.refuse_clashes(features_of([], overlap=False), JOB)
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    with pytest.raises(Refused, match="Accelerate does not go with 2 processes per worker"):
        compatibility.refuse_clashes(features_of([], overlap=False), JOB)


def test_the_rate_is_scaled_by_all_processes() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    assert LrScaling.of(replace(JOB, lr_scaling="linear"), optimizer).factor(0) == 6.0
    assert LrScaling.of(replace(JOB, lr_scaling="linear", processes=1), optimizer).factor(0) == 3.0


def worker(job: Converted) -> dict[str, Any]:
    containers: list[dict[str, Any]] = job.manifest["spec"]["workers"]["template"]["spec"]["containers"]
    return next(item for item in containers if item["name"] == "worker")


def test_torchruns_own_parser_has_no_option_that_is_not_known() -> None:
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for option in action.option_strings:
            if option in ("-h", "--help", "--print-completion", "--print_completion"):
                continue
            value = [] if action.nargs == 0 else ["1"]
            assert worker(from_words_of([option, *value]))["command"][-1] == "train.py"


def from_words_of(options: list[str]) -> Converted:
    return from_words(["torchrun", *options, "train.py"], Wishes())


def test_what_is_known_of_accelerate_is_what_its_own_parser_takes() -> None:
    from accelerate.commands.launch import launch_command_parser

    kinds = {option.lstrip("-"): action.nargs == 0 for action in launch_command_parser()._actions for option in action.option_strings}
    assert {name: kinds.get(name) for name in launcher.TAKEN_FLAGS} == dict.fromkeys(launcher.TAKEN_FLAGS, True)
    valued = (*launcher.TAKEN_VALUES, *launcher.DROPPED_VALUES)
    assert {name: kinds.get(name) for name in valued} == dict.fromkeys(valued, False)
    assert kinds["m"]


ONE = Config("job", "run", "0", "sync", 0, None, 3, (), CheckpointConfig(1.0, None, 2, True, None), "AllWorkers", 10.0, 10.0)
LOCAL = replace(ONE, mode="local", local=LocalConfig())
STAGED = replace(ONE, stages=Stages((1, 1)))
LATE = replace(STAGED, schedule="pipedream")
SEVERAL = replace(ONE, processes=2)
DELAYED = replace(ONE, delay=1)
NOTHING = Features()
OVERLAP, RULE, ROWS, SUMS = Features(overlap=True), Features(half_rule=True), Features(rows="words"), Features(sums="counts")
TOP_K = CompressionConfig(push="topk")

BOTH: list[tuple[str, Features, Config | None]] = [
    ("attach(…, overlap=True) does not go with attach(…, later=…)", replace(OVERLAP, later=True), None),
    ("attach(…, overlap=True) does not go with modules of torch.jit", replace(OVERLAP, scripted=True), None),
    ("does not go with training.updateRule dana-slim", replace(OVERLAP, half_rule=True),
     replace(ONE, mode="async", update_rule="dana-slim")),
    ("attach(…, overlap=True) does not go with training.mode local", OVERLAP, LOCAL),
    ("attach(…, overlap=True) does not go with 2 processes per worker", OVERLAP, SEVERAL),
    ("training.updateRule dana-slim with its part on the workers does not go with 2 processes", RULE,
     replace(SEVERAL, mode="async", update_rule="dana-slim")),
    ("a table of rows on the shards (ps.Embedding, ps.Table) does not go with 2 processes", ROWS, SEVERAL),
    ("Accelerate does not go with 2 processes per worker: it makes a process group", Features(library="Accelerate"), SEVERAL),
    ("attach(…, overlap=True) does not go with 2 attached optimizers", replace(OVERLAP, pairs=2), ONE),
    ("training.updateRule dana-slim with its part on the workers does not go with 2 attached", replace(RULE, pairs=2),
     replace(ONE, mode="async", update_rule="dana-slim")),
    ("a table of rows on the shards (ps.Embedding, ps.Table) does not go with 3 attached optimizers", replace(SUMS, pairs=3), ONE),
    ("training.mode local does not go with 2 attached optimizers", Features(pairs=2), LOCAL),
    ("a table of rows on the shards (ps.Embedding, ps.Table) does not go with training.mode local", ROWS, LOCAL),
    ("ps.Table counts does not go with training.mode threshold", SUMS, replace(ONE, mode="threshold")),
    ("ps.Table counts does not go with training.sync.backupWorkers 1", SUMS, replace(ONE, backup_workers=1)),
    ("training.sync.reduction median does not go with rows of words on the shards", ROWS, replace(ONE, reduction="median")),
    ("training.sync.maxGradNorm does not go with rows of words on the shards", ROWS, replace(ONE, max_grad_norm=1.0)),
    ("training.sync.reduction median does not go with training.compression.push topk", NOTHING,
     replace(ONE, reduction="median", compression=TOP_K)),
    ("attach(…, overlap=True) does not go with training.delay 1: both hide the same time; leave one of the two out", OVERLAP, DELAYED),
    ("training.delay 1 does not go with 2 attached optimizers; leave it out, or attach one optimizer only", Features(pairs=2), DELAYED),
    ("training.updateRule dana-slim with its part on the workers does not go with training.delay 1: the state of that part is saved", RULE,
     replace(DELAYED, mode="async", update_rule="dana-slim")),
    ("training.updateRule gap-aware does not go with training.delay 1: the rule measures from the last weights", Features(),
     replace(DELAYED, mode="async", update_rule="gap-aware")),
    ("training.compression.push int8 does not go with training.delay 1: what a push leaves out goes into the next one", Features(),
     replace(DELAYED, compression=CompressionConfig(push="int8"))),
    ("a table of rows on the shards (ps.Embedding, ps.Table) does not go with training.delay 2: rows of a step are pushed with it; "
     "take delay 1 or 0", SUMS, replace(ONE, mode="bounded", delay=2)),
    ("attach(…, name=…) does not go with a job of stages", Features(named=True), STAGED),
    ("attach(…, overlap=True) does not go with a job of stages", OVERLAP, STAGED),
    ("several attached optimizers does not go with a job of stages", Features(pairs=2), STAGED),
    ("training.nonFinite skip does not go with a job of stages: a stage would skip", NOTHING, replace(STAGED, non_finite="skip")),
    ("training.warmupSteps does not go with a job of stages", NOTHING, replace(STAGED, warmup_steps=5)),
    ("training.maxPushNorm does not go with a job of stages", NOTHING, replace(STAGED, max_push_norm=1.0)),
    ("training.lrScaling linear does not go with a job of stages", NOTHING, replace(STAGED, lr_scaling="linear")),
    ("training.sync.maxGradNorm does not go with training.pipeline.schedule pipedream", NOTHING, replace(LATE, max_grad_norm=1.0)),
    ("training.compression.push topk does not go with training.pipeline.schedule pipedream; ", NOTHING, replace(LATE, compression=TOP_K)),
    ("workers.progressDeadlineSeconds does not go with a job of stages", NOTHING, replace(STAGED, step_timeout=5.0)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "features", "job", "clash"), [(*both, clash) for both, clash in zip(BOTH, CLASHES, strict=True)])
def test_both_are_refused_and_each_is_taken(said: str, features: Features, job: Config | None, clash: Clash) -> None:
    assert clash.holds(features, job) and said in clash.sentence(features, job)
    with pytest.raises(Refused, match=r" does not go with .*; "):
        refuse_clashes(features, job)
    assert not clash.holds(NOTHING, ONE)
    refuse_clashes(NOTHING, ONE)
    if job is not None and features != NOTHING:
        assert not clash.holds(features, None), "outside a job only the script counts"


def test_what_goes_together_is_taken() -> None:
    for features, job in (
        (OVERLAP, ONE),
        (Features(pairs=2, named=True), ONE),
        (ROWS, ONE),
        (SUMS, replace(ONE, mode="bounded")),
        (ROWS, DELAYED),
    ):
        refuse_clashes(features, job)
    for job in (
        LOCAL,
        STAGED,
        LATE,
        SEVERAL,
        DELAYED,
        replace(ONE, mode="async", update_rule="dana-zero", delay=8),
        replace(ONE, reduction="median"),
        replace(ONE, mode="async", update_rule="nag"),
    ):
        refuse_clashes(NOTHING, job)
