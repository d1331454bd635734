"""A model in stages is trained by `psjob run`, with real processes that are killed: the weights are those of one process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split_model
from tests.e2e.workloads import stages
from tests.e2e.workloads.running import HERE, ROOT, Ran, faults, manifest, stopped_from, train
from tests.support import pipeline_reference as reference
from tests.support import warm
from tests.support.hardware import DEVICES, repeatable
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)
CUTS = ("2", "5")
every_device = pytest.mark.parametrize("device", DEVICES)


def job(folder: Path, pace: float = 0.0, replicas: tuple[int, ...] = (1, 1, 1), words: Sequence[str] = (), **training: Any) -> Path:
    """Stages of so many workers each; the manifest says where they are cut, unless the script leaves it to psjob."""
    stages: list[dict[str, Any]] = [{"name": f"part-{number}", "replicas": count} for number, count in enumerate(replicas)]
    for stage, cut in zip(stages[1:], CUTS, strict=True):
        if "auto" not in words:
            stage["cut"] = cut
    return manifest(
        folder, ["stages.py", str(pace), *words], workers=sum(replicas), shards=2, stages=stages, training={"mode": "sync", **training},
        checkpoint={"periodSeconds": 3600, "everySteps": 10},
    )  # fmt: skip


@functools.cache
def alone(device: str = "cpu", script: str | None = None) -> dict[str, torch.Tensor]:
    """What the same script outside a job comes to. `script`: its text, where it is another one."""
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory() as folder:
        path = HERE / "stages.py" if script is None else Path(folder) / "script.py"
        if script is not None:
            path.write_text(script)
        output = Path(folder) / "output.txt"
        code = warm.start_python(Path(folder), [str(path), "0", device, *CUTS], env, output, output, warm.COMPILING).wait(300)
        assert code == 0, output.read_text()
        state: dict[str, torch.Tensor] = torch.load(Path(folder) / "alone.pt", weights_only=True)
    return state


def same(ran: Ran, device: str = "cpu") -> None:
    weights, wanted = ran.weights(), alone(device)
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor), (name, (weights[name] - tensor).abs().max())


@every_device
@pytest.mark.parametrize("training", [{}, soak({"transport": "tcp", "encryption": "tls"})], ids=["usual", "encrypted"])
def test_three_stages_train_what_one_process_trains(tmp_path: Path, device: str, training: dict[str, Any]) -> None:
    ran = train(tmp_path, job(tmp_path, words=[device], **training))
    assert ran.summary["restarts"] == {}
    same(ran, device)


@every_device
@pytest.mark.parametrize("hit", [rotating("worker-1"), *(soak(hit) for hit in ("worker-0", "worker-2", "shard-0", "shard-1"))])
def test_a_kill_of_a_stage_or_a_shard_changes_no_bit(tmp_path: Path, hit: str, device: str) -> None:
    ran = train(tmp_path, job(tmp_path, 0.03, words=[device]), *faults(f"kill:{hit}@step=25"))
    assert [recovery["fault"] for recovery in ran.summary["recoveries"]] == [f"kill:{hit}@step=25"]
    same(ran, device)


@pytest.mark.soak
def test_psjob_chooses_the_cuts_once(tmp_path: Path) -> None:
    """Workers that are started again, the one that chose too, and shard 0 continue with the same cuts."""
    hits = faults("kill:worker-0@step=20", "kill:worker-1@step=30", "kill:shard-0@step=40")
    ran = train(tmp_path, job(tmp_path, 0.03, words=["auto"]), *hits)
    assert len(ran.summary["recoveries"]) == 3
    said = ran.log("job-shard-0")
    assert said.count("cuts: auto cuts the model at") == 1 and "{name: part-1, cut:" in said
    same(ran)


@pytest.mark.soak
def test_workers_of_a_stage_share_its_micro_batches(tmp_path: Path) -> None:
    """A kill changes no bit of such a run either."""
    calm = train(tmp_path / "calm", job(tmp_path / "calm", replicas=(2, 1, 1)))
    hit = train(tmp_path / "hit", job(tmp_path / "hit", 0.03, (2, 1, 1)), *faults("kill:worker-1@step=25", "kill:worker-2@step=40"))
    assert hit.sha == calm.sha


SLOW = """
HELD = []


class Slow(nn.Tanh):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        HELD[:] = HELD or [torch.ones(16 << 20)]
        return super().forward(x)


"""


@pytest.mark.rotating
def test_each_stage_says_how_it_stands(tmp_path: Path) -> None:
    """The first stage is the slow one: the others wait for it, and it waits least. Its process holds more than the others."""
    text = (HERE / "stages.py").read_text().replace("STEPS, WIDE = 60", "STEPS, WIDE = 20").replace("first, nn.Tanh()", "first, Slow()")
    (tmp_path / "script.py").write_text(text.replace("def main(", SLOW + "def main(", 1))
    path = job(tmp_path)
    path.write_text(path.read_text().replace(str(HERE / "stages.py"), "script.py"))
    ran = train(tmp_path, path)
    told = json.loads((ran.folder / "live.json").read_text())["coordinator"]["stages"]
    assert [(one["name"], one["desired"], one["ready"], one["step"], one["delay"]) for one in told] == [
        (f"part-{number}", 1, 1, 20, 0.0) for number in range(3)
    ]
    slow, *others = (one["idle"] for one in told)
    assert all(slow < other <= 1 for other in others), told
    large, *small = (one["peakBytes"] for one in told)
    assert all(0 < 32 << 20 < large - size for size in small), told
    status = json.loads((ran.folder / "status.json").read_text())
    assert status["stagesReady"] == "3/3"
    assert [(one["name"], one["workersReady"]) for one in status["stages"]] == [(f"part-{number}", "1/1") for number in range(3)]
    words = [sys.executable, "-m", "psjob_client.cli.main", "get", "job", "--local"]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    head = next(line for line in said if line.startswith("STAGE"))
    assert head.split()[:7] == ["STAGE", "WORKERS", "STEP", "STALENESS", "IDLE", "MEMORY", "PEAK"]
    (row,) = (line.split() for line in said if line.startswith("part-0"))
    assert row[:4] == ["part-0", "1/1", "20", "0"] and row[4] == f"{slow:.0%}"


LATE: dict[str, tuple[dict[str, str], list[str]]] = {
    "2bw": ({"schedule": "2bw"}, []),
    "pipedream": ({"schedule": "pipedream"}, ["untied"]),
    "recompute": ({"schedule": "pipedream", "weights": "recompute"}, ["untied"]),
    "dc-asgd": ({"schedule": "2bw", "correct": "dc-asgd"}, []),
    "gap-aware": ({"schedule": "pipedream", "correct": "gap-aware"}, ["untied"]),
    "plain": ({"schedule": "2bw"}, ["untied", "plain"]),
}
"""Of training.pipeline, and of the model: a weight that two stages share goes only with one delay of all."""


@functools.cache
def old_weights(name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What the same batches make of the model in one process, on weights as old as the formula says."""
    torch.set_num_threads(1)
    pipeline, words = LATE[name]
    on = repeatable(device)
    model = stages.model_of(*words).to(on)
    batches = [(x.to(on), y.to(on)) for x, y in DataLoader(stages.data_of(), batch_size=10)]
    optimizer = stages.optimizer_of if device == "cpu" else stages.OnHost
    way = schedule.way_of(pipeline["schedule"], pipeline.get("weights", "stash"))
    made = reference.train(
        model, torch.nn.functional.mse_loss, batches, parts=split_model(model, CUTS), way=way,
        microbatches=4, optimizer=lambda parameters, _delay: optimizer(parameters), seed=7,
        correct=predict.corrector(way, pipeline.get("correct", "none"), {}),
    )  # fmt: skip
    tied = {"7.weight": made.weights["0.weight"]} if "untied" not in words else {}
    return {key: tensor.cpu() for key, tensor in (made.weights | made.buffers | tied).items()}


def late(folder: Path, name: str, pace: float = 0.0, device: str = "cpu") -> Path:
    pipeline, words = LATE[name]
    return job(folder, pace, words=[device, *words], pipeline={"microbatches": 4, **pipeline})


@every_device
@pytest.mark.parametrize("name", [rotating("2bw"), *(soak(name) for name in ("pipedream", "gap-aware", "recompute", "dc-asgd"))])
def test_without_flush_gradients_are_those_of_old_weights(tmp_path: Path, name: str, device: str) -> None:
    ran = train(tmp_path, late(tmp_path, name, device=device))
    assert ran.summary["restarts"] == {} and ran.summary["steps"] == stages.STEPS
    told = json.loads((ran.folder / "live.json").read_text())["coordinator"]["stages"]
    assert all(0 < one["delay"] <= 1 for one in (told if name in ("2bw", "dc-asgd") else told[1:-1])), told
    weights, expected = ran.weights(), old_weights(name, device)
    if device == "cuda":
        assert all(one["devicePeakBytes"] > 0 for one in told), told
    for key, tensor in weights.items():
        assert torch.equal(tensor, expected[key]), (key, (tensor - expected[key]).abs().max())


@pytest.mark.parametrize("hit", [rotating("worker-1"), *(soak(hit) for hit in ("shard-0", "worker-0", "worker-2"))])
def test_without_flush_a_kill_changes_little(tmp_path: Path, hit: str) -> None:
    """A process that comes back computes on newer weights than the one that was lost would have."""
    ran = train(tmp_path, late(tmp_path, "plain", 0.03), *faults(f"kill:{hit}@step=25"))
    assert [recovery["fault"] for recovery in ran.summary["recoveries"]] == [f"kill:{hit}@step=25"]
    assert ran.summary["steps"] == stages.STEPS
    weights, expected = ran.weights(), old_weights("plain")
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[key], atol=0.01, rtol=0.1)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["2bw", "pipedream"])
def test_without_flush_a_run_that_was_stopped_goes_on(tmp_path: Path, name: str) -> None:
    """All stages stop at one step, whose batches before count once each. What was open then is begun anew."""
    path = late(tmp_path, name, 0.1)
    stopped = stopped_from(tmp_path, path, 20)
    at = stopped.summary["checkpoint"]["step"]
    assert stopped.summary["result"] == "Suspended" and 20 <= at < stages.STEPS, stopped.err
    ran = train(tmp_path, path, "--resume", str(stopped.folder))
    assert ran.summary["steps"] == stages.STEPS
    assert ran.weights()["4.num_batches_tracked"] == 4 * stages.STEPS, "each micro-batch went through once, but for what was open"


def with_line(folder: Path, path: Path, line: str, size: int = 10) -> str:
    """Let the job of this manifest run the script with one more line after each `pipe.step`, on batches of `size`; the text of it."""
    text = (HERE / "stages.py").read_text().replace("loss = pipe.step(x, y)", f"loss = pipe.step(x, y); {line}")
    text = text.replace("batch_size=10", f"batch_size={size}")
    (folder / "script.py").write_text(text)
    path.write_text(path.read_text().replace(str(HERE / "stages.py"), "script.py"))
    return text


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.2)"
_ALIKE = "clip_grad_norm_ with max_norm 0.2 in a job of stages, whose workers must all clip alike; set spec.training.sync.maxGradNorm: 0.2"
ADDS = "[setattr(p, 'grad', torch.ones_like(p)) for p in model.parameters()]"


@pytest.mark.parametrize(
    ("line", "training", "says"),
    [
        # What would show first values of other stages,
        rotating("ps.step() < 2 or ps.export('weights.safetensors')", {}, "model.state_dict() in a job of stages"),
        rotating("ps.step() < 2 or model(x)", {}, "a forward of the model in a job of stages"),
        soak("ps.step() < 2 or optimizer.state_dict()", {}, "optimizer.state_dict() in a job of stages"),
        soak("ps.step() < 2 or pipe.evaluate(x)", {}, "pipe.evaluate in a job"),
        rotating("ps.step() < 2 or pipe.step(x, y)", {}, "pipe.step was called twice in step 2"),
        # what would be lost without flush,
        rotating(f"ps.step() < 2 or {ADDS}", {"schedule": "2bw"}, "the script has added gradients of its own"),
        rotating("None", {"schedule": "2bw", "size": 3}, "has 3 samples, and without flush it needs one for each of 4 micro-batches"),
        # and a norm for which a stage would wait.
        rotating(
            CLIP,
            {"schedule": "pipedream", "words": ["untied"]},
            "clip_grad_norm_ in a job of stages does not go with training.pipeline.schedule pipedream",
        ),
        rotating(f"ps.rank() or {CLIP}", {"words": ["untied"]}, _ALIKE),
        rotating(CLIP, {"words": ["untied"], "sync": {"maxGradNorm": 0.3}}, _ALIKE),
    ],
)
def test_what_a_script_may_not_do_in_stages_is_refused(tmp_path: Path, line: str, training: dict[str, Any], says: str) -> None:
    training = dict(training)
    size, schedule = training.pop("size", 10), training.pop("schedule", None)
    if schedule is not None:
        training |= {"pipeline": {"microbatches": 4, "schedule": schedule}}
    path = job(tmp_path, **training)
    with_line(tmp_path, path, line, size)
    ran = train(tmp_path, path, expect=1)
    said = ran.err + ran.log("job-worker-0")
    assert says in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("line", "training"),
    [
        rotating(CLIP, {"sync": {"maxGradNorm": 0.2}}),
        soak("nn.utils.clip_grad_value_(model.parameters(), 0.01)", {}),
    ],
    ids=["norm", "value"],
)
def test_a_script_clips_as_one_process_does(tmp_path: Path, line: str, training: dict[str, Any]) -> None:
    """By value to the bit. Sums of squares are made by blocks, so that the last bits of a norm may be others than torch's."""
    path = job(tmp_path, **training)
    wanted, weights = alone(script=with_line(tmp_path, path, line)), train(tmp_path, path).weights()
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4 if training else 0.0, rtol=0.0)
    assert (wanted["2.weight"] - alone()["2.weight"]).abs().max() > 1e-3


@pytest.mark.rotating
def test_what_stages_cannot_do_is_refused(tmp_path: Path) -> None:
    ran = train(tmp_path, job(tmp_path, mode="async"), expect=2)
    assert "stages" in ran.err
    path = manifest(tmp_path / "other", ["stages.py", "0", "2"], workers=2, shards=1)
    ran = train(tmp_path / "other", path, expect=1)
    assert "a job without stages: give the manifest spec.stages" in ran.err + ran.log("job-worker-0")
