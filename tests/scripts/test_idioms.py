"""Scripts as people have them: under psjob they compute what they compute under torch.distributed, or are refused with a remedy.

So they do with a worker and a shard killed.

Each script of `idioms/` (see `cells`) runs with two workers and two shards, and in two processes that sum with gloo.
Parameters must be equal within a tolerance.

- A mistake in a script is one sentence with a remedy and the script's line, and ends the job: no line of psjob's own code is shown.
- docs/scripts.md: its code runs in a job, and the scripts that it names are there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts.cells import SCRIPTS, WORKERS, command_of, manifest, scripts_of
from tests.support import warm
from tests.support.quick import rest_rotates

pytestmark = pytest.mark.timeout(600)
SECONDS = 280.0
"""For a script that takes one or two, on a busy machine."""
LOOSE: dict[str, float] = {"bfloat16_parameters": 0.05}
"""Tolerances, where 1e-5 is too little, by script."""
REFUSED: dict[str, tuple[str, str]] = {
    "clamps_weights": ("was changed by hand after step 1", "clamps_weights_worker_side"),
    "complex_parameters": ("take torch.view_as_complex of it in forward", "complex_as_real"),
    "ema_not_swapped_back": ("put them back before a step", "ema_swapped_for_evaluation"),
    "embedding_max_norm": ("max_norm", "embedding_normed_in_forward"),
    "initialised_after_attach": ("Change them before attach", "initialised_before_attach"),
    "kfold_in_one_process": ("attach was called twice; give each model a name", "kfold"),
    "lbfgs": ("LBFGS evaluates the loss several times", "sequence_by_adam"),
    "renormalises_weights": ("or under a parametrization", "parametrized weight_norm"),
    "sam_wrapped": ("SAM evaluates its closure at other weights", "sam"),
    "one_of_two_models_attached": ("Give attach all models that it trains as one", "one_optimizer_of_two_models"),
    "second_phase_on_shards": ("Make both optimizers first and give attach both", "two_phases_at_once"),
    "sparse_gradients": ("SparseAdam steps the rows of a worker's own batch", "sparse_gradients_of_adagrad"),
    "steps_by_hand": ("no step of the attached optimizer was made", "mlp"),
    "steps_by_hand_without_optimizer": ("which needs one", "mlp"),
    "two_models_unnamed": ("give each model a name, such as attach(model, optimizer, name='generator')", "gan"),
    "weights_loaded_after_attach": ("Change them before attach", "begins_from_a_checkpoint"),
}
"""By script: words of the sentence, and the script of its remedy."""
TOLD: dict[str, tuple[str, str]] = {
    "clamps_gradients": ("the gradient of 0.weight was changed by hand", "clip_value"),
    "sync_batchnorm": ("SyncBatchNorm (1) is BatchNorm in a job, which has no process group", "group_norm"),
}
"""As `REFUSED`, where the script runs on and is told once what it computes."""
QUICK = {
    "accumulation_modulo", "clip_norm", "cnn_batchnorm", "frozen_and_tied", "gan", "grad_scaler", "optimizers AdamW", "rnn_hidden_state",
    "samplers uneven", "schedulers OneCycleLR", "stream", "tiny_transformer",
    "two_classes_of_optimizer",
}  # fmt: skip
"""Cases that `make test` runs: steps, clipping, buffers, tied weights, two models, schedules, uneven data and streams."""
UNKEPT: dict[str, str] = {
    "ema": "average (",
    "ema_swapped_for_evaluation": "average (",
    "plateau_by_validation": "kept (",
    "replay_buffer": "buffer (",
    "rnn_hidden_state": "hidden (",
    "swa": "averaged (",
}
"""Scripts that a restart may refuse, with the variable that it names."""
KILLS = ("--fault", "kill:worker-1@step=4", "--fault", "kill:shard-0@step=8")
QUICK_REFUSED = {
    "clamps_weights", "kfold_in_one_process", "lbfgs", "sparse_gradients", "two_models_unnamed", "weights_loaded_after_attach",
}  # fmt: skip
"""As `QUICK`, of `REFUSED`: one of each kind of sentence."""


def cases() -> list[str]:
    """Scripts, and a case for each argument: `name word`."""
    found = [case for name, script in SCRIPTS.items() for case in [f"{name} {word}" for word in script.arguments] or [name]]
    return sorted(case for case in found if case not in REFUSED | TOLD)


def trained(folder: Path, case: str, *faults: str) -> tuple[int, str, dict[str, torch.Tensor]]:
    """Under psjob: exit code, output, final weights."""
    folder.mkdir()
    job = manifest(folder, command_of(folder, case), SCRIPTS[case.split()[0]].training)
    words = ["run", str(job), "--no-progress", *faults]
    code, output = warm.run(folder, words, seconds=SECONDS, preloaded=warm.COMPILING)
    finals = list(folder.glob(".psjob/*/final.safetensors"))
    return code, output, load_file(finals[0]) if finals else {}


class Expected:
    """A run of a case in processes that sum with gloo, from when it is made."""

    def __init__(self, folder: Path, case: str) -> None:
        folder.mkdir()
        self.folder = folder
        words = [str(WORKERS), "weights", *command_of(folder, case)]
        output = folder / "output.txt"
        self.process = warm.start(folder, "tests.scripts.ddp", words, None, output, output, warm.COMPILING)

    def weights(self) -> dict[str, torch.Tensor]:
        """Its final weights, once it has ended."""
        code = self.process.wait(SECONDS)
        assert code == 0, (self.folder / "output.txt").read_text()[-4000:]
        return load_file(self.folder / "weights")


@pytest.mark.parametrize("case", sorted(QUICK))
def test_a_script_computes_what_it_computes_with_ddp(tmp_path: Path, case: str) -> None:
    beside = Expected(tmp_path / "ddp", case)
    check(case, trained(tmp_path / "psjob", case), beside)


@pytest.mark.parametrize("case", rest_rotates(cases(), []))
def test_so_it_does_with_a_worker_and_a_shard_killed(tmp_path: Path, case: str) -> None:
    beside = Expected(tmp_path / "ddp", case)
    code, output, found = trained(tmp_path / "psjob", case, *KILLS)
    if code and case in UNKEPT:
        assert "nobody keeps it" in output and UNKEPT[case] in output and "Traceback" not in output, output[-4000:]
        beside.weights()
        return
    check(case, (code, output, found), beside)


def check(case: str, ran: tuple[int, str, dict[str, torch.Tensor]], beside: Expected) -> None:
    """A run under psjob came to the weights that gloo's came to."""
    code, output, found = ran
    assert code == 0, output[-4000:]
    wanted = beside.weights()
    assert found
    tolerance = LOOSE.get(case, LOOSE.get(case.split()[0], 1e-5))
    for key, value in found.items():
        there = wanted[key if key in wanted else f"0.{key}"]
        differs = float((value - there).abs().max()) if value.numel() else 0.0
        assert torch.allclose(value, there, rtol=tolerance, atol=tolerance), f"{key} differs by {differs:.3g}: {output[-3000:]}"


@pytest.mark.parametrize("case", rest_rotates(sorted(REFUSED), QUICK_REFUSED))
def test_what_cannot_be_right_is_refused_and_its_remedy_works(tmp_path: Path, case: str) -> None:
    words, remedy = REFUSED[case]
    code, output, _ = trained(tmp_path / "psjob", case)
    assert code != 0 and words in output, output[-4000:]
    assert "Traceback" not in output
    assert remedy in cases(), "the remedy is a script that is tested"


@pytest.mark.parametrize("case", rest_rotates(sorted(TOLD), {"clamps_gradients"}))
def test_what_differs_is_told_once(tmp_path: Path, case: str) -> None:
    words, remedy = TOLD[case]
    code, output, _ = trained(tmp_path / "psjob", case)
    assert code == 0 and output.count(words) == 1, output[-4000:]
    assert remedy in cases(), "the remedy is a script that is tested"


def test_the_scripts_are_short() -> None:
    long = {name: count for name, script in SCRIPTS.items() if (count := len(script.text.splitlines())) > 60}
    assert not long


MISTAKES = scripts_of(Path(__file__).parent / "mistakes.py")
QUICK_MISTAKES = {"weights_by_hand", "a_lazy_module"}


@pytest.mark.parametrize("case", rest_rotates(sorted(MISTAKES), QUICK_MISTAKES))
def test_a_mistake_is_a_sentence(tmp_path: Path, case: str) -> None:
    words = ["run", str(manifest(tmp_path, command_of(tmp_path, case, MISTAKES))), "--no-progress"]
    code, output = warm.run(tmp_path, words, seconds=200)
    said = MISTAKES[case].sentence
    assert code == 1 and "Traceback" not in output and 'File "' not in output, output[-3000:]
    lines = [line for line in output.splitlines() if said in line]
    assert [line for line in lines if re.search(rf"\({case}\.py:\d+\)", line)] == lines, output[-3000:]
    by_script = [line for line in lines if line.startswith("psjob: ")]
    assert 1 <= len(by_script) <= 2, "by the worker that is shown, and by another one if that ended first"
    assert len(lines) - len(by_script) <= 1, "a long sentence is shortened in the last line"
    assert re.match(r"Failed: Refused: worker \d: ", output.splitlines()[-1]), output[-3000:]


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scripts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"\n```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.rotating
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs_in_a_job(tmp_path: Path, number: int) -> None:
    (tmp_path / "page.py").write_text(BLOCKS[number], encoding="utf-8")
    job = manifest(tmp_path, ["page.py"])
    code, output = warm.run(tmp_path, ["run", str(job), "--no-progress"])
    assert code == 0 and "changed by hand" not in output, output[-3000:]
    assert "Complete: 6 steps" in output
    assert (
        float(re.findall(r"^(?:\[.*\] )?(?:average|largest) (\S+)$", (tmp_path / "output.txt").read_text() + output, re.MULTILINE)[0]) < 0.5
    )


def test_the_scripts_of_the_page_are_those_that_are_tested() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    named = {word for row in rows for word in re.findall(r"`([a-z_0-9]+)`", row.rsplit("|", 2)[1])}
    assert len(named) > 50 and named <= set(SCRIPTS)
