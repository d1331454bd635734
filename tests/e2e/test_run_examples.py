"""Every example on this machine, with `psjob run` and the real runtime.

- `training.sync.reduction` of a job's own, imported by the shards' processes from the manifest's folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.e2e.local_job import EXAMPLES, Ended, run
from tests.support import warm
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("manifest", "least"), [("job.yaml", 0.97), rotating("async.yaml", 0.95)])
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


@pytest.mark.soak
def test_digits_keeps_its_momentum_in_async_by_dana_and_not_by_nag(tmp_path: Path) -> None:
    scores = {}
    for rule in ("nag", "dana"):
        (tmp_path / rule).mkdir()
        ended = run(tmp_path / rule, EXAMPLES / "digits" / f"async-{rule}.yaml")
        assert ended.code == 0, ended.told
        scores[rule] = ended.summary["metrics"]["test_accuracy"]
    assert scores["dana"] >= 0.93 and scores["dana"] >= scores["nag"] + 0.05, scores


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


@pytest.mark.soak
def test_clicks_learns_rows_that_no_worker_holds(tmp_path: Path) -> None:
    ended = run(tmp_path, EXAMPLES / "clicks" / "job.yaml", "--set", "spec.workers.replicas=1")
    assert ended.code == 0, ended.told
    words = ended.output.splitlines()[-1].rsplit(" ", 1)
    assert words[0] == "test auc" and 0.8 <= float(words[1]) <= 1
    assert ended.summary["result"] == "Complete" and ended.summary["restarts"] == {}
    rows = {name: ended.weights[name].shape for name in ("user.ids", "user.weight", "item.weight")}
    assert rows["user.weight"] == (rows["user.ids"][0], 16) and rows["item.weight"] == (300, 16), "rows are whole in the final file"


@pytest.mark.soak
@pytest.mark.parametrize("killed", ["shard-0", "shard-1", "worker-1"])
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


STEP_WORDS = 10 * 50
"""Of the lda's batch of documents; each takes a token from one topic and gives it to another."""


@pytest.mark.soak
def test_lda_counts_exactly_and_learns_what_one_process_learns(tmp_path: Path) -> None:
    import numpy as np

    # In the middle: who continues alone in the first passes settles on topics that half of the documents do not share.
    ended = run(tmp_path, EXAMPLES / "lda" / "job.yaml", "--fault", "kill:worker-1@step=120")
    assert ended.code == 0, ended.told
    assert ended.summary["result"] == "Complete" and ended.summary["restarts"] == {"Signal": 1} and ended.summary["updates_lost"] == 0
    words, topics = (ended.weights[f"{name}.weight"] for name in ("words", "topics"))
    documents, unseen = loaded("lda").corpus()
    # The kill may fall into a push: what one step draws is then of two tries (docs/tables.md), and no token counts twice.
    assert words.dtype == np.int32 and topics.sum() == documents.numel()
    assert np.abs(words.sum(0) - topics[0]).sum() <= 2 * STEP_WORDS
    assert words.sum(1).tolist() == np.bincount(documents.flatten(), minlength=len(words)).tolist(), "every word has one topic"
    alone = subprocess.run([sys.executable, str(EXAMPLES / "lda" / "train.py")], capture_output=True, text=True, timeout=300, check=True)
    one = float(alone.stdout.splitlines()[-1].rsplit(" ", 1)[1])
    assert judged_topics(words, unseen.numpy()) == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("mode", [rotating("sync"), soak("async")])
def test_lda_goes_on_without_a_shard_that_was_lost(tmp_path: Path, mode: str) -> None:
    """In sync not a word is lost; in async a shard's last pushes are."""
    words = ["--set", f"spec.training.mode={mode}", "--set", "spec.checkpoint.everySteps=50", "--fault", "kill:shard-1@step=120"]
    ended = run(tmp_path, EXAMPLES / "lda" / "job.yaml", *words)
    assert ended.code == 0, ended.told
    found, topics = (ended.weights[f"{name}.weight"] for name in ("words", "topics"))
    documents, unseen = loaded("lda").corpus()
    if mode == "sync":
        assert found.sum(0).tolist() == topics[0].tolist() and found.sum() == documents.numel() and ended.summary["updates_lost"] == 0
    assert judged_topics(found.clip(0), unseen.numpy()) == pytest.approx(-3.415, rel=0.03)


def judged_topics(counts: Any, unseen: Any) -> float:
    """Mean log-likelihood of the later half of each unseen document, its mixture of topics fitted to the first half."""
    import numpy as np

    half = unseen.shape[1] // 2
    topics = (counts + 0.1) / (counts + 0.1).sum(0)
    found = []
    for document in unseen:
        mixture = np.full(topics.shape[1], 1 / topics.shape[1])
        for _ in range(50):
            share = topics[document[:half]] * mixture
            mixture = (share / share.sum(1, keepdims=True)).sum(0) + 0.5
            mixture /= mixture.sum()
        found.append(np.log(topics[document[half:]] @ mixture).mean())
    return float(np.mean(found))


@pytest.mark.rotating
def test_shortest_paths_are_scipys(tmp_path: Path) -> None:
    import numpy as np
    from scipy.sparse.csgraph import shortest_path

    ended = run(tmp_path, EXAMPLES / "shortest-paths" / "job.yaml")
    assert ended.code == 0, ended.told
    graph = np.full((50, 50), np.inf)
    for begin, end, length in loaded("shortest-paths").road_map():
        if begin != end:
            graph[begin, end] = min(graph[begin, end], length)
    assert np.array_equal(ended.weights["far.weight"], shortest_path(graph, method="D").T)
    assert ended.summary["steps"] < 50 and "found after" in ended.output


def loaded(example: str) -> ModuleType:
    """An example's script as a module, for the data that it makes."""
    spec = spec_from_file_location(f"example_{example.replace('-', '_')}", EXAMPLES / example / "train.py")
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(("manifest", "exchanges"), [rotating("job.yaml", 4), soak("job-sync.yaml", 200)])
def test_charlm_learns_with_few_exchanges(tmp_path: Path, manifest: str, exchanges: int) -> None:
    """A fifth of its steps; who guesses by the frequency of only each character comes to more than 3 nats."""
    words = 'spec.workers.template.spec.containers[0].args=["--steps=200"]'
    ended = run(tmp_path, EXAMPLES / "charlm" / manifest, "--set", words)
    assert ended.code == 0, ended.told
    assert ended.summary["steps"] == exchanges and f"step 200, {exchanges} exchanges: " in ended.output
    assert 1 < ended.summary["metrics"]["unseen_loss"] < 2.4


def test_minimal_is_ten_lines_and_two_more() -> None:
    script = (EXAMPLES / "minimal" / "train.py").read_text()
    lines = [line for line in script.splitlines() if line.strip()]
    ours = [line for line in lines if "ps." in line or "psjob" in line]
    assert len(ours) == 2 and len(lines) - len(ours) <= 10


@pytest.mark.rotating
def test_minimal_learns(tmp_path: Path) -> None:
    ended = run(tmp_path, EXAMPLES / "minimal" / "job.yaml")
    assert ended.code == 0, ended.told
    assert ended.summary["steps"] == 200 and "loss 0.000000" in ended.output


@pytest.mark.rotating
def test_gpu_trains_here_too(tmp_path: Path) -> None:
    ended = run(tmp_path, EXAMPLES / "gpu" / "job.yaml", "--set", "spec.workers.replicas=2", "--set", "spec.shards.replicas=1")
    assert ended.code == 0, ended.told
    assert ended.summary["metrics"]["accuracy"] >= 0.9 and "resources" in ended.told


OUTSIDE = ("charlm", "clicks", "digits", "gpu", "lda", "minimal", "shortest-paths")


@pytest.mark.rotating
@pytest.mark.parametrize("example", OUTSIDE)
def test_an_example_is_plain_torch_outside_a_job(tmp_path: Path, example: str) -> None:
    args = {"charlm": ["--steps", "20"], "clicks": ["--epochs", "2"], "digits": ["--epochs", "2"], "lda": ["--passes", "2"]}.get(
        example, []
    )
    output = tmp_path / "output.txt"
    folder = tmp_path / "empty"
    folder.mkdir()
    process = warm.start_python(folder, [str(EXAMPLES / example / "train.py"), *args], None, output, output, warm.COMPILING)
    assert process.wait(300) == 0, output.read_text()
    assert list(folder.iterdir()) == []


TRAIN = """
import torch
import psjob as ps

model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
for step in range(20):
    model.weight.grad = torch.full((1, 3), -1.0 if ps.rank() else -1000.0)
    optimizer.step()
"""
OWN = """
import torch

def highest(pushes):
    return torch.stack(pushes).amax(0)

def breaks(pushes):
    if float(pushes[0][0]) < -900:
        raise RuntimeError("a push of nonsense")
    return pushes[0]
"""


def trained(folder: Path, reduction: str) -> Ended:
    (folder / "train.py").write_text(TRAIN)
    (folder / "own.py").write_text(OWN)
    container = {"name": "worker", "image": "none", "command": ["python", "train.py"]}
    spec = {
        "training": {"sync": {"reduction": reduction}},
        "shards": {"replicas": 1},
        "workers": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
    }
    job = {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "own"}, "spec": spec}
    (folder / "job.yaml").write_text(json.dumps(job))
    return run(folder, folder / "job.yaml", timeout=120)


@pytest.mark.rotating
def test_a_module_beside_the_manifest_reduces(tmp_path: Path) -> None:
    ended = trained(tmp_path, "own:highest")
    assert ended.code == 0, ended.told
    assert ended.weights["weight"].tolist() == [[20.0] * 3]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("reduction", "words"),
    [
        ("nowhere:f", "training.sync.reduction nowhere:f cannot be imported: ModuleNotFoundError"),
        (
            "own:breaks",
            "step 0 of block 0: training.sync.reduction own:breaks failed on 2 pushes of float32 [3]: RuntimeError: a push of nonsense",
        ),
    ],
)
def test_a_function_that_cannot_serve_fails_the_job_with_one_sentence(tmp_path: Path, reduction: str, words: str) -> None:
    ended = trained(tmp_path, reduction)
    assert ended.code != 0 and ended.summary["result"] == "Failed" and ended.summary["restarts"] == {}
    assert words in ended.told and "Traceback" not in ended.told
