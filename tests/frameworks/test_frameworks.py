"""Trainer, Lightning and Accelerate in a job: the weights of DDP, on the same slices, and the same bits after a kill.

The reference is torch's own DistributedDataParallel over gloo, as each library starts it, of the same script.

- final.safetensors of models by others has what their state_dict has, no more and no less: each loads it with `strict=True`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.runs import CELLS, HERE, SECONDS, TOLERANCE, WORKERS, Run, alone, assert_equal, resumed, with_ddp
from tests.frameworks.scripts.any_model import built
from tests.scripts.cells import command_of
from tests.support import warm
from tests.support.quick import rest_rotates
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)


def final_loss(output: str) -> float:
    """Of a script, over all data."""
    return float(re.findall(r"^final loss (\S+)$", output, re.MULTILINE)[0])


AS_DDP = {
    "trainer": ["trainer.py"],
    "trainer, accumulating": ["trainer.py", "optim=sgd", "lr=0.5", "accumulate=3"],
    "trainer, without clipping": ["trainer.py", "optim=sgd", "lr=0.5", "clip=0"],
    "accelerate, attached before prepare": ["accelerated.py", "attach=before"],
    "accelerate, attached after prepare": ["accelerated.py", "attach=after"],
    "accelerate, accumulating": ["accelerated.py", "attach=after", "accumulate=4"],
    "lightning": ["lit.py"],
    "lightning, accumulating": ["lit.py", "accumulate=4"],
    "lightning, bfloat16": ["lit.py", "precision=bf16-mixed"],
}
QUICK = {"trainer", "accelerate, attached after prepare", "lightning"}
"""One of each library; `make test` runs these."""
LOOSE = {"lightning, bfloat16": 1e-3, "trainer": 1e-2}
"""Adam makes steps of noise where a gradient is 0 but for rounding, as that of the keys' bias is."""


@pytest.mark.parametrize("case", rest_rotates(AS_DDP, QUICK))
def test_a_job_trains_as_ddp_does(tmp_path: Path, case: str) -> None:
    words = AS_DDP[case]
    run = Run(tmp_path / "job", words)
    found = run.weights()
    ddp = ["strategy=ddp", "rank=RANK"] if words[0] == "lit.py" else []
    wanted, output = with_ddp(tmp_path / "ddp", [*(word for word in words if not word.startswith("attach=")), *ddp])
    assert_equal(found, wanted, LOOSE.get(case, TOLERANCE))
    assert final_loss(run.output) == pytest.approx(final_loss(output), abs=1e-3 if "bfloat16" in case else 1e-5)
    assert "same data" not in run.output


KILLS = {
    "a worker of the trainer": (["trainer.py", "order=random", "dropout=0.2"], "kill:worker-1@step=13"),
    "rank 0 of the trainer": (["trainer.py", "order=random", "dropout=0.2", "logger=tensorboard"], "kill:worker-0@step=13"),
    "a shard of the trainer, accumulating": (["trainer.py", "order=random", "dropout=0.2", "accumulate=3"], "kill:shard-1@step=5"),
    "rank 0 of lightning": (["lit.py", "order=random", "dropout=0.2", "logger=yes"], "kill:worker-0@step=14"),
    "a shard of lightning": (["lit.py", "order=random", "dropout=0.2", "accumulate=2", "validate=0.5"], "kill:shard-0@step=9"),
    "a shard of accelerate": (["accelerated.py", "attach=before", "order=random", "dropout=0.2", "accumulate=4"], "kill:shard-1@step=5"),
    "a worker of accelerate": (["accelerated.py", "attach=after", "order=random", "dropout=0.2"], "kill:worker-1@step=14"),
}
QUICK_KILLS = {"a worker of the trainer"}
"""As `QUICK`."""


@pytest.mark.parametrize("case", rest_rotates(KILLS, QUICK_KILLS))
def test_the_bits_are_the_same_after_a_kill(tmp_path: Path, case: str) -> None:
    words, fault = KILLS[case]
    undisturbed, killed = resumed(tmp_path, words, fault)
    for name, value in undisturbed.summary["metrics"].items():
        if "runtime" not in name and "second" not in name:
            assert killed.summary["metrics"][name] == pytest.approx(value, abs=1e-6), name
    last = [line for line in killed.output.splitlines() if line.startswith(("steps", "epoch"))][-1]
    for logs in ("lightning_logs", "out/runs"):
        runs = list((tmp_path / "killed").glob(f"{logs}/*"))
        assert len(runs) == ("logger=yes" in words and logs == "lightning_logs") + ("logger=tensorboard" in words and logs == "out/runs")
    assert last in undisturbed.output, "the framework's own counts are those of a run without a kill"


UNEVEN = {"trainer": ("trainer.py", 2), "lightning": ("lit.py", 3), "accelerate": ("accelerated.py", 3)}
"""Script, and its epochs."""


@pytest.mark.rotating
@pytest.mark.parametrize("case", UNEVEN)
def test_all_workers_make_the_same_steps_of_uneven_data(tmp_path: Path, case: str) -> None:
    """11 batches: 6 rounds for two workers, of which one has no batch in the last. Steps of two batches: 3 an epoch."""
    script, epochs = UNEVEN[case]
    words = [script, "count=21", "accumulate=2", "order=random", "dropout=0.2", *(["attach=after"] if case == "accelerate" else [])]
    run, _ = resumed(tmp_path, words, "kill:worker-1@step=4", 1)
    assert run.summary["steps"] == 3 * epochs


@pytest.mark.rotating
def test_metrics_of_the_frameworks_are_the_jobs(tmp_path: Path) -> None:
    trainer = Run(tmp_path / "trainer", ["trainer.py", "save=epoch"])
    assert {"loss", "lr", "epoch", "eval_loss", "grad_norm", "train_loss"} <= trainer.summary["metrics"].keys(), trainer.output[-3000:]
    lit = Run(tmp_path / "lit", ["lit.py", "save=yes"])
    assert {"loss", "lr", "epoch", "train_loss", "val_loss"} <= lit.summary["metrics"].keys(), lit.output[-3000:]
    # Their own checkpoints are written once, by rank 0.
    assert sorted(path.name for path in (tmp_path / "trainer" / "out").iterdir()) == ["checkpoint-10", "checkpoint-20"]
    assert (tmp_path / "trainer" / "out" / "checkpoint-20" / "model.safetensors").is_file()
    assert len(list((tmp_path / "lit").glob("checkpoints/*.ckpt"))) == 1


@pytest.mark.rotating
def test_every_worker_loads_the_best_checkpoint_of_a_trainer(tmp_path: Path) -> None:
    run = Run(tmp_path / "job", ["best.py"])
    assert run.code == 0, run.output[-4000:]
    found = [re.findall(r"^best (\S+) (\S+) (\S+)$", text, re.MULTILINE) for text in run.workers()]
    ((path, metric, again),) = found[0]
    assert found == [found[0]] * WORKERS
    assert path == "out/checkpoint-5", "its loss was the largest"
    assert float(again) == pytest.approx(float(metric), abs=1e-6)


def test_a_script_changes_three_lines_at_most() -> None:
    for script in (HERE / name for name in ("accelerated.py", "lit.py", "trainer.py")):
        ours = [line for line in script.read_text().splitlines() if re.search(r"psjob|\bps\.|PSCallback|\bstrategy=strategy", line)]
        alternatives = sum("ps.attach" in line for line in ours) - 1  # the script of Accelerate has two, of which one runs
        assert len([line for line in ours if not line.startswith('"""')]) - max(0, alternatives) <= 3, script.name


ROOT = HERE.parents[2]


@pytest.mark.rotating
@pytest.mark.parametrize("page", ["transformers", "lightning", "accelerate"])
def test_the_script_of_a_page_runs_in_a_job_and_alone(tmp_path: Path, page: str) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"# new$", script, re.MULTILINE)) <= 3
    (tmp_path / "train.py").write_text(script)
    in_job = Run(tmp_path / "job", [str(tmp_path / "train.py")])
    assert in_job.code == 0, in_job.output[-4000:]
    assert in_job.summary["steps"] > 5
    alone(tmp_path / "alone", str(tmp_path / "train.py"))


REFUSED = {
    "trainer_resumes": "Trainer.train(resume_from_checkpoint=...) in a job",
    "trainer_late_callback": "PSCallback came after the Trainer was made",
    "trainer_finds_batch_size": "TrainingArguments(auto_find_batch_size=...) in a job",
    "lit_two_optimizers": "configure_optimizers gave 2 optimizers, and PSStrategy attaches one",
    "lit_resumes": "Trainer.fit(ckpt_path=...) in a job",
    "fabric_late": "attach after fabric.setup",
    "lit_averages": "StochasticWeightAveraging in a job",
    "accelerate_loads": "load_state_dict after attach",
    "accelerate_skips": "skip_first_batches(3) in a job: ps.shard continues at its batch",
    "accelerate_splits": "Accelerator(split_batches=True) with a batch size of 3 and 2 workers",
    "accelerate_gathers": "in a pass over ps.shard that trains nothing: workers have different numbers of its batches",
    "accelerate_triggers": "Accelerator.check_trigger in mode async: workers do not stand at the same step",
}
QUICK_REFUSED = {"trainer_resumes", "lit_two_optimizers", "accelerate_loads"}
"""As `QUICK`."""


@pytest.mark.parametrize("name", rest_rotates(REFUSED, QUICK_REFUSED))
def test_what_a_framework_cannot_do_in_a_job_is_refused(tmp_path: Path, name: str) -> None:
    training = {"mode": "sync", "seed": 0, **CELLS[name].training}
    run = Run(tmp_path / "job", command_of(tmp_path, name, CELLS), spec={"training": training})
    assert run.code != 0
    assert REFUSED[name] in run.output, run.output[-4000:]
    assert "Traceback" not in run.output, run.output[-4000:]


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["trainer_by_hand", "lit_by_hand"])
def test_a_loop_without_the_integration_is_told_of_its_data(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / "job", command_of(tmp_path, name, CELLS))
    assert run.code == 0, run.output[-4000:]
    assert "does not use psjob.shard" in run.output and "went to several workers" in run.output, run.output[-4000:]


@pytest.mark.parametrize("package", ["transformers", "lightning", "accelerate"])
def test_without_the_package_one_sentence_says_how_to_get_it(tmp_path: Path, package: str) -> None:
    code, output = by_itself(tmp_path, f"import sys; sys.modules[{package!r}] = None; import psjob.integrations.{package}")
    assert code != 0
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: psjob.integrations.{package} needs the package {package}") and f"pip install {package}" in last


def test_psjob_imports_none_of_them(tmp_path: Path) -> None:
    script = "import sys, psjob as ps; ps.attach, ps.shard; print({'transformers', 'lightning', 'accelerate'} & sys.modules.keys())"
    assert by_itself(tmp_path, script) == (0, "set()\n")


def by_itself(folder: Path, text: str) -> tuple[int, str]:
    """`python -c TEXT` from a process that has imported psjob and no framework; exit code, and what it printed."""
    output = folder / "output.txt"
    process = warm.start_python(folder, ["-c", text], None, output, output)
    return process.wait(SECONDS), output.read_text()


@pytest.mark.parametrize("module", ["transformers", "lightning", "accelerate"])
def test_the_examples_of_docstrings_run(tmp_path: Path, module: str) -> None:
    script = (
        f"import doctest, psjob.integrations.{module} as m\nfailed, tried = doctest.testmod(m)\nassert not failed\nprint('tried', tried)"
    )
    (tmp_path / "examples.py").write_text(script)
    assert "tried" in alone(tmp_path, str(tmp_path / "examples.py"))


SMALL: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE: dict[str, Any] = {name: size for name, size in SMALL.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": SMALL,
    "GPT2LMHeadModel": {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "T5ForConditionalGeneration": {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "LlamaForCausalLM": {**SMALL, "tie_word_embeddings": True},
    "ViTForImageClassification": IMAGE,
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "BartForConditionalGeneration": {
        "vocab_size": 20, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 1, "eos_token_id": 2,
    },
    "DistilBertForSequenceClassification": {"vocab_size": 20, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "ElectraForPreTraining": {**SMALL, "embedding_size": 8},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25, "image_size": 32},
    "timm.resnet18": {"num_classes": 4},
    "timm.vit_tiny_patch16_224": {"img_size": 32, "num_classes": 4, "depth": 2},
    "timm.efficientnet_b0": {"num_classes": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", [rotating(name) if name == "BertForMaskedLM" else soak(name) for name in MODELS])
def test_the_final_weights_are_loaded_strictly(tmp_path: Path, name: str) -> None:
    if name.startswith("timm.") and importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not there; run: pip install timm")
    ran = Run(tmp_path / "run", ["any_model.py", name, json.dumps(MODELS[name])])
    assert ran.code == 0, ran.output[-3000:]
    final = ran.weights()
    model = built(name, MODELS[name])
    model.load_state_dict(final, strict=True)
    first = built(name, MODELS[name]).state_dict()
    assert any(not tensor.equal(first[key]) for key, tensor in model.state_dict().items()), "it was not trained"
    assert all(torch.isfinite(tensor).all() for tensor in final.values() if tensor.is_floating_point())
