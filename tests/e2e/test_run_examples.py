"""Every example on this machine, with `psjob run` and the real runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.local_job import EXAMPLES, run


@pytest.mark.parametrize(("manifest", "least"), [("job.yaml", 0.97), ("async.yaml", 0.95)])
def test_digits_ends_with_its_accuracy(tmp_path: Path, manifest: str, least: float) -> None:
    ended = run(tmp_path, EXAMPLES / "digits" / manifest)
    assert ended.code == 0, ended.told
    words = ended.output.splitlines()[-1].rsplit(" ", 1)
    assert words[0] == "test accuracy" and least <= float(words[1]) <= 1
    assert ended.summary["result"] == "Complete" and ended.summary["steps"] >= 150 and ended.summary["restarts"] == {}
    assert ended.summary["metrics"]["test_accuracy"] >= least
    # What the job leaves is judged by plain arithmetic too, without psjob.
    assert judged(ended.weights) >= least
    assert not (EXAMPLES / "digits" / ".psjob").exists()


def judged(weights: dict[str, object]) -> float:
    """The part of digits.py's unseen images that the weights recognise."""
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    _, unseen, _, wanted = train_test_split(images / 16, labels, test_size=0.2, random_state=2, stratify=labels)
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    hidden = np.maximum(unseen @ w["0.weight"].T + w["0.bias"], 0)
    return float(((hidden @ w["2.weight"].T + w["2.bias"]).argmax(1) == wanted).mean())


def test_clicks_learns_rows_that_no_worker_holds(tmp_path: Path) -> None:
    ended = run(tmp_path, EXAMPLES / "clicks" / "job.yaml", "--set", "spec.workers.replicas=1")
    assert ended.code == 0, ended.told
    words = ended.output.splitlines()[-1].rsplit(" ", 1)
    assert words[0] == "test auc" and 0.8 <= float(words[1]) <= 1
    assert ended.summary["result"] == "Complete" and ended.summary["restarts"] == {}
    rows = {name: ended.weights[name].shape for name in ("user.ids", "user.weight", "item.weight")}
    assert rows["user.weight"] == (rows["user.ids"][0], 16) and rows["item.weight"] == (300, 16), "rows are whole in the final file"


@pytest.mark.soak
@pytest.mark.parametrize("killed", ["ps-0", "ps-1", "worker-1"])
def test_clicks_has_the_same_bits_across_a_kill_and_another_transport(tmp_path: Path, killed: str) -> None:
    hashes = []
    for way, words in {"tcp": ["--set", "spec.training.transport=tcp"], "shared": ["--fault", f"kill:{killed}@step=250"]}.items():
        (tmp_path / way).mkdir()
        ended = run(tmp_path / way, EXAMPLES / "clicks" / "job.yaml", *words)
        assert ended.code == 0, ended.told
        assert ended.summary["transport"] == way
        assert ended.summary["restarts"] == ({"Signal": 1} if way == "shared" else {})
        hashes.append(ended.summary["weights_sha256"])
    assert hashes[0] == hashes[1]


def test_minimal_is_ten_lines_and_two_more(tmp_path: Path) -> None:
    script = (EXAMPLES / "minimal" / "train.py").read_text()
    lines = [line for line in script.splitlines() if line.strip()]
    ours = [line for line in lines if "ps." in line or "psjob" in line]
    assert len(ours) == 2 and len(lines) - len(ours) <= 10
    ended = run(tmp_path, EXAMPLES / "minimal" / "job.yaml")
    assert ended.code == 0, ended.told
    assert ended.summary["steps"] == 200 and "loss 0.000000" in ended.output


def test_gpu_trains_here_too(tmp_path: Path) -> None:
    ended = run(tmp_path, EXAMPLES / "gpu" / "job.yaml", "--set", "spec.workers.replicas=2", "--set", "spec.ps.shards=1")
    assert ended.code == 0, ended.told
    assert ended.summary["metrics"]["accuracy"] >= 0.9 and "resources" in ended.told


@pytest.mark.parametrize("example", ["clicks", "digits", "minimal", "gpu"])
def test_an_example_is_plain_torch_outside_a_job(tmp_path: Path, example: str) -> None:
    args = ["--epochs", "2"] if example in ("clicks", "digits") else []
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / example / "train.py"), *args], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.iterdir()) == []
