"""Workers of several processes: their weights are a sum of sums, they push once, and the death of each process changes no bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.rules.optimizers import describe_optimizer
from tests.e2e.workloads import mlp
from tests.e2e.workloads.running import Ran, faults, finish, manifest, start, train
from tests.support.hardware import on_devices, repeatable
from tests.support.reference import reference
from tests.support.soaking import rotating, soak

STEPS = 40
pytestmark = pytest.mark.timeout(1500)
every_way = pytest.mark.parametrize(("device", "way"), [soak("cpu", "gloo"), *on_devices("shared")])
"""If models lie, and how processes of a worker sum. All processes share one GPU here, which NCCL refuses."""


def job(
    folder: Path, workers: int, processes: int | None, *words: str, script: str = "local_ranks.py", way: str = "auto", **spec: Any
) -> Path:
    made = manifest(folder, [script, *words], workers=workers, shards=2, **spec)
    raw = json.loads(made.read_text())
    if processes is not None:
        raw["spec"]["workers"] |= {"processes": processes, "localSum": way}
    made.write_text(json.dumps(raw))
    return made


def pushed(ran: Ran) -> int:
    """Bytes of all pushes, as the shards have counted them."""
    return sum(int(ran.last_words(f"job-shard-{shard}-a1")["status"]["counters"]["pushBytes"]) for shard in range(2))


def batches(world: int, step: int, last: int, device: torch.device) -> list[mlp.Batch | None]:
    return [batch and (batch[0].to(device), batch[1].to(device)) for batch in mlp.micro_batches(STEPS, world, step, last)]


@every_way
@pytest.mark.parametrize(("workers", "processes", "last"), [(2, 2, 3), soak(1, 4, 4)])
def test_weights_are_those_of_a_sum_of_sums(tmp_path: Path, workers: int, processes: int, last: int, device: str, way: str) -> None:
    """In local order first, then in the order of the workers; the last round of the first case has one process without a batch."""
    torch.set_num_threads(1)
    ran = train(tmp_path, job(tmp_path, workers, processes, str(STEPS), str(last), device, way=way))
    world, on = workers * processes, repeatable(device)
    model = mlp.build().to(on)
    rule, hyperparameters = describe_optimizer(mlp.optimizer_for("sgd", model))
    assert rule is not None
    reference(model, rule, hyperparameters, lambda step: batches(world, step, last, on), mlp.loss_of, STEPS, processes=processes)
    held = ran.weights()
    for name, parameter in model.named_parameters():
        found = parameter.detach().cpu()
        assert torch.equal(held[name], found), f"{name}: {(held[name] != found).sum()} of {found.numel()} differ"
    assert pushed(ran) == STEPS * workers * sum(p.nbytes for p in model.parameters())
    for rank in range(world):
        names = json.loads((ran.folder / f"names-{rank}.json").read_text())
        assert names == {
            "LOCAL_RANK": str(rank % processes), "LOCAL_WORLD_SIZE": str(processes), "RANK": str(rank), "WORLD_SIZE": str(world),
            "GROUP_RANK": str(rank // processes), "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
        assert (ran.folder / f"ended-{rank}").read_text() == str(STEPS)
    for worker in range(workers):
        told = f"the processes of worker {worker} sum their gradients by {way}: the manifest asks for it"
        assert told in ran.log(f"job-worker-{worker}")


@pytest.mark.rotating
def test_bytes_to_the_shards_are_a_quarter_of_those_of_four_workers(tmp_path: Path) -> None:
    ran = []
    for workers, processes in ((1, 4), (4, None)):
        folder = tmp_path / str(workers)
        ran.append(train(folder, job(folder, workers, processes, "sgd", "10", script="mlp.py", training={"transport": "tcp"})))
    one, four = ran
    assert one.summary["steps"] == four.summary["steps"] == 10
    assert 4 * pushed(one) == pushed(four) > 0


@pytest.mark.soak
def test_a_lost_shard_sends_all_processes_back(tmp_path: Path) -> None:
    """They begin again in place, and no start of a worker counts."""
    calm = train(tmp_path / "calm", job(tmp_path / "calm", 2, 2, "60", "4", "drops"))
    hit = train(tmp_path / "hit", job(tmp_path / "hit", 2, 2, "60", "4", "drops", "slow"), *faults("kill:shard-1@step=20"))
    assert hit.sha == calm.sha
    assert [worker["start"] for worker in hit.summary["workers"]] == [1, 1] and hit.summary["attempts"] == [1, 2]
    assert all(worker["rewinds"] == 1 for worker in hit.summary["workers"])


OTHER_WAYS = [
    rotating({"mode": "async"}),
    *(soak(way) for way in ({"compression": {"push": "int8"}}, {"updateAt": "worker"})),
]


@pytest.mark.parametrize("training", OTHER_WAYS, ids=str)
def test_other_ways_of_training_go_with_several_processes(tmp_path: Path, training: dict[str, Any]) -> None:
    ran = train(tmp_path, job(tmp_path, 2, 2, "20", "4", training=training))
    assert ran.summary["steps"] == 20 and ran.summary["updates_lost"] == 0
    assert sorted(path.name for path in ran.folder.glob("ended-*")) == [f"ended-{rank}" for rank in range(4)]


@pytest.mark.soak
def test_a_stopped_run_goes_on_at_its_last_step(tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", job(tmp_path / "calm", 2, 2, "60", "4", "drops"))
    made = job(tmp_path / "hit", 2, 2, "60", "4", "drops", "slow")
    process = start(tmp_path / "hit", made)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "hit").glob(".psjob/*/inside-slow")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    stopped = finish(process, tmp_path / "hit")
    assert stopped.summary["result"] == "Suspended" and 10 < stopped.summary["checkpoint"]["step"] < 60
    again = train(tmp_path / "hit", made, "--resume", str(stopped.folder))
    assert again.sha == calm.sha


@pytest.mark.soak
def test_rank_0_may_evaluate_alone_and_die_after_that(tmp_path: Path) -> None:
    """Its passes over data are more than those of the others, which do not wait for them."""
    calm = train(tmp_path / "calm", job(tmp_path / "calm", 1, 2, "20", "2", "evals"))
    hit = train(tmp_path / "hit", job(tmp_path / "hit", 1, 2, "20", "2", "evals", "0:12"))
    assert hit.sha == calm.sha and hit.summary["restarts"] == {} and (hit.folder / "died-0").exists()


@pytest.mark.rotating
def test_processes_may_make_different_numbers_of_steps(tmp_path: Path) -> None:
    """Who is through is absent from then on, as a worker of one process would be. The order of sums is the same in each way."""
    found = set()
    for way in ("auto", "gloo"):
        ran = train(tmp_path / way, job(tmp_path / way, 1, 3, "20", "3", "uneven", way=way))
        assert [(ran.folder / f"ended-{rank}").read_text() for rank in range(3)] == ["10", "11", "12"]
        assert ran.summary["steps"] == 12
        found.add(ran.sha)
    assert len(found) == 1


@pytest.mark.rotating
def test_a_way_that_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    ran = train(tmp_path, job(tmp_path, 1, 2, "5", "2", way="nccl"), expect=1)
    assert "spec.workers.localSum is nccl, and nccl cannot sum here: models are in host memory" in ran.err
    assert "Traceback" not in ran.err + ran.log("job-worker-0")


@pytest.mark.rotating
def test_processes_with_different_models_are_refused(tmp_path: Path) -> None:
    made = job(tmp_path, 1, 2, "5", "2", "odd")
    ran = train(tmp_path, made, expect=1)
    assert "process 1 of worker 0 attached another model than process 0: it has 0.weight (8, 16) float32 there" in ran.err


@pytest.mark.rotating
def test_a_process_that_ends_before_the_others_is_told(tmp_path: Path) -> None:
    """As by a script in which all but the first process leave at once."""
    ran = train(tmp_path, job(tmp_path, 1, 2, "5", "2", "early"), expect=1)
    assert "process 1 of worker 0 has ended before the others; all processes of a worker stay until" in ran.err
    assert "Traceback" not in ran.err + ran.log("job-worker-0")


@pytest.mark.rotating
@every_way
def test_each_process_may_die_at_any_step(tmp_path: Path, device: str, way: str) -> None:
    """The first death of a start is answered in place, the second one by a new start, which counts."""
    calm = train(tmp_path / "calm", job(tmp_path / "calm", 1, 4, str(STEPS), "4", "drops", device, way="shared"))
    deaths = ["0:5", "1:12", "2:20", "3:28"]
    hit = train(tmp_path / "hit", job(tmp_path / "hit", 1, 4, str(STEPS), "4", "drops", device, *deaths, way=way))
    assert sorted(path.name for path in hit.folder.glob("died-*")) == [f"died-{rank}" for rank in range(4)]
    assert hit.sha == calm.sha
    assert hit.summary["restarts"] == {"Error": 2} and hit.summary["duplicates_refused"] == 0
    assert hit.log("job-worker-0").count("start again") == 2
    assert "all rewind" not in hit.log("job-shard-0"), "each time the record of the step under way was at hand"


@pytest.mark.parametrize("rank", [soak(2), rotating(3)])
def test_a_death_beside_another_worker_is_answered_in_place(tmp_path: Path, rank: int) -> None:
    calm = train(tmp_path / "calm", job(tmp_path / "calm", 2, 2, "30", "4", "drops"))
    hit = train(tmp_path / "hit", job(tmp_path / "hit", 2, 2, "30", "4", "drops", f"{rank}:11"))
    assert (hit.folder / f"died-{rank}").exists()
    assert hit.sha == calm.sha and hit.summary["restarts"] == {}
