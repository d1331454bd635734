"""Scripts that end with exit code 0 before they are through: the job continues, or fails with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.workloads.running import Ran, faults, run_script

pytestmark = pytest.mark.timeout(600)
SCRIPT = """import multiprocessing
import os
import signal
import sys

import torch

import psjob as ps


def train():
    torch.manual_seed(0)
    data = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    model, opt = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    first = os.environ["PSJOB_START"] == "1" and os.environ["PSJOB_INDEX"] == "0"
    loader = ps.shard(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4))
    step = 0
    for epoch in ps.epochs(3):
        for (x,) in loader:
            opt.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            opt.step()
            step += 1
            AFTER_A_STEP


AT_THE_END
"""
HANDLED = "if first and step == 11: os.kill(os.getpid(), signal.SIGTERM)"
PLAIN = ("pass", "train()")


def run(folder: Path, after: str, end: str, *what: str) -> Ran:
    return run_script(folder, SCRIPT.replace("AFTER_A_STEP", after).replace("AT_THE_END", end), *faults(*what))


@pytest.mark.rotating
def test_os_exit_fails_with_a_sentence(tmp_path: Path) -> None:
    ran = run(tmp_path, "pass", "train()\nos._exit(0)")
    assert ran.code == 1 and ran.summary["result"] == "Failed"
    assert "ended with exit code 0: it left in the middle of training: by os._exit" in ran.err
    assert ran.summary["restarts"] == {"UnfinishedExit": 2}


@pytest.mark.rotating
def test_exit_0_on_sigterm_is_a_stop_and_not_the_end(tmp_path: Path) -> None:
    """A handler that the script has of its own ends it in the middle of a pass, as in a pod that is drained."""
    wanted = run(tmp_path / "plain", *PLAIN)
    ran = run(tmp_path / "hit", HANDLED, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntrain()")
    assert wanted.code == ran.code == 0, ran.err[-3000:]
    assert ran.summary["restarts"] == {"Retry": 1} and ran.summary["steps"] == wanted.summary["steps"] == 24
    assert "the script ended on SIGTERM with exit code 0 before its loop was over" in ran.log("job-worker-0")
    assert ran.sha == wanted.sha


@pytest.mark.rotating
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_script_that_trains_in_a_child_process_is_complete(tmp_path: Path, how: str) -> None:
    body = f"""if __name__ == "__main__":
    process = multiprocessing.get_context("{how}").Process(target=train)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
    ran = run(tmp_path, "pass", body)
    assert ran.code == 0 and ran.summary["restarts"] == {} and ran.summary["steps"] == 24, ran.err[-3000:]


@pytest.mark.rotating
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_child_process_begins_again_in_place(tmp_path: Path, how: str) -> None:
    """Its parent gets its result once, and no failure is counted but the shard's."""
    body = f"""def told(results):
    train()
    results.put(list(range(1000)))


if __name__ == "__main__":
    context = multiprocessing.get_context("{how}")
    results = context.Queue()
    process = context.Process(target=told, args=(results,))
    process.start()
    print("result", len(results.get()))
    process.join()
    sys.exit(process.exitcode)
"""
    wanted = run(tmp_path / "plain", *PLAIN)
    ran = run(tmp_path / "hit", "pass", body, "kill:shard-0@step=11", "kill:shard-0@step=20")
    assert ran.code == 0 and ran.summary["steps"] == 24, ran.err[-3000:]
    assert sum(ran.summary["restarts"].values()) == 2 and "Traceback" not in ran.err, ran.err[-3000:]
    assert (ran.out + ran.err).count("result 1000") == 1
    assert ran.sha == wanted.sha


@pytest.mark.rotating
def test_a_loop_in_a_thread_begins_again_in_place(tmp_path: Path) -> None:
    wanted = run(tmp_path / "plain", *PLAIN)
    body = "import threading\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()"
    ran = run(tmp_path / "hit", "pass", body, "kill:shard-0@step=11")
    assert ran.code == 0 and ran.summary["restarts"] == {"Signal": 1} and "Traceback" not in ran.err, ran.err[-3000:]
    assert ran.sha == wanted.sha


@pytest.mark.rotating
def test_an_error_in_the_thread_that_trains_is_no_end(tmp_path: Path) -> None:
    body = "import threading\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()"
    ran = run(tmp_path, "assert step != 11, 'of the thread'", body)
    assert ran.code == 1 and ran.summary["result"] == "Failed", ran.err[-3000:]
    assert "ScriptFailed" in ran.err and "AssertionError: of the thread" in ran.err


@pytest.mark.rotating
def test_a_second_process_of_a_worker_is_refused(tmp_path: Path) -> None:
    """As in Hogwild: each would be the same worker to the job."""
    body = """def child(_):
    train()


if __name__ == "__main__":
    import torch.multiprocessing
    torch.multiprocessing.spawn(child, nprocs=2)
"""
    ran = run(tmp_path, "pass", body)
    assert ran.code == 1 and ran.summary["restarts"] == {}, ran.err[-3000:]
    assert "Failed: Refused: worker" in ran.err and "has attached. Processes that train side by side are those of spec.workers" in ran.err
