"""`psjob plan-stages` on scripts: what it finds of a model whose figures are known, and the sentences of those it cannot profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import IMPORTS, OFFLINE
from tests.support import warm
from tests.support.hardware import DEVICES
from tests.support.soaking import rotating

MACHINE = ("--preset", "ethernet-10", "-o", "json")
BLOCKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.outer(self.act(self.inner(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.place = nn.Parameter(torch.zeros(32))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.ones(10))

    def forward(self, x):
        first = h = self.words(x) + self.place
        for layer in self.layers:
            h = layer(h)
        return self.head(h + first)

def build():
    return Net(), torch.randint(0, 100, (8, 5)), lambda out: out.logsumexp(-1).mean()
"""
SCRIPT = (
    BLOCKS
    + """
import sys, psjob as ps
if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    model, optimizer = ps.attach(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(Net()))
    for _ in range(10**9):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randint(0, 100, (8, 5))).flatten(0, 1), torch.zeros(40, dtype=torch.long)).backward()
        optimizer.step()
"""
)


def profile(folder: Path, text: str, target: str = "train.py", *words: str) -> dict[str, Any]:
    code, printed, told = run(folder, text, target, "--save", "p.json", *words)
    assert code == 0, told
    assert json.loads(printed)["stages"]
    found: dict[str, Any] = json.loads((folder / "p.json").read_text())
    return found


def run(folder: Path, text: str, target: str, *words: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text(text)
    return plan(folder, target, *words)


def plan(folder: Path, target: str, *words: str, preloaded: Sequence[str] = warm.COMPILING) -> tuple[int, str, str]:
    """`psjob plan-stages`: its exit code, and what it printed on both streams."""
    argv = ["plan-stages", target, *MACHINE, *words]
    streams = folder / "printed.txt", folder / "told.txt"
    started = warm.start(folder, "psjob_client.cli.main", argv, OFFLINE, *streams, preloaded)
    printed, told = started.communicate(timeout=200)
    return started.wait(), printed, told


@pytest.mark.parametrize(
    ("text", "target", "words"), [(SCRIPT, "train.py", ()), rotating(BLOCKS, "train.py:build", ()), (BLOCKS, "train.py:build", ("--meta",))]
)
def test_bytes_are_those_that_the_model_must_have(tmp_path: Path, text: str, target: str, words: tuple[str, ...]) -> None:
    found = profile(tmp_path, text, target, *words)
    assert [node["name"] for node in found["nodes"]] == ["words", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    hidden = 8 * 5 * 32 * 4
    block = 4 * (2 * 32 * 64 + 64 + 32)
    assert [node["parameters"] for node in found["nodes"]] == [32 * 4, block, block, block, block, 0]
    assert found["tied"] == [{"bytes": 100 * 32 * 4, "nodes": [0, 5]}]
    assert found["nodes"][0]["outputs"] == [{"bytes": hidden, "to": [1, 4]}], (
        "the first sum is read by a block, and by the glue before the head"
    )
    assert [node["outputs"] for node in found["nodes"][1:5]] == [[{"bytes": hidden, "to": [i]}] for i in range(2, 6)]
    # A block makes the hidden layer after its ReLU, which is kept once, and its sum, which the next one keeps.
    assert [node["saved"] for node in found["nodes"][1:4]] == [3 * hidden] * 3
    assert found["nodes"][0]["fixed"] == 10 * 4 and found["samples"] == 8 and found["input"] == 8 * 5 * 8
    assert found["estimated"] is bool(words) and all(node["forward"] > 0 for node in found["nodes"][1:])
    assert all(node["backward"] > 0 for node in found["nodes"][1:])


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_is_timed_on_the_device_where_it_lies(tmp_path: Path, device: str) -> None:
    text = BLOCKS.replace(
        "return Net(), torch.randint(0, 100, (8, 5))", f"return Net().to('{device}'), torch.randint(0, 100, (8, 5), device='{device}')"
    )
    found = profile(tmp_path, text, "train.py:build")
    assert found["device"] == torch.cuda.get_device_name() if device == "cuda" else found["device"].startswith("cpu, ")
    assert [node["saved"] for node in found["nodes"][1:4]] == [3 * 8 * 5 * 32 * 4] * 3
    assert all(node["forward"] > 0 and node["backward"] > 0 for node in found["nodes"][1:]) and not found["estimated"]


def test_a_shared_relu_binds_nothing_and_a_module_that_runs_twice_does(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), nn.ReLU()

    def forward(self, x):
        x = self.act(self.a(x))
        x = self.act(self.b(self.c(self.b(x))))
        return self.d(x)

def build(): return Net(), torch.randn(4, 8)
"""
    found = profile(tmp_path, text, "train.py:build")
    assert [node["name"] for node in found["nodes"]] == ["a", "b", "d"]
    assert [node["parameters"] for node in found["nodes"]] == [4 * 72, 2 * 4 * 72, 4 * 9]


def test_what_is_too_large_is_opened(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

def build():
    small, large = (nn.Sequential(*(nn.Linear(n, n) for _ in range(3))) for n in (16, 16))
    return nn.Sequential(small, nn.Sequential(large, nn.Linear(16, 300))), torch.randn(4, 16)
"""
    found = profile(tmp_path, text, "train.py:build")
    assert [node["name"] for node in found["nodes"]] == ["0.0", "0.1", "0.2", "1.0.0", "1.0.1", "1.0.2", "1.1"]


@pytest.mark.parametrize(
    ("text", "target", "line"),
    [
        ("print(1)", "train.py", "train.py ended without an optimizer.step() of a model that it called; write `def build()"),
        ("raise ValueError('no data')", "train.py", "train.py: ValueError: no data"),
        ("import sys; sys.exit(3)", "train.py", "train.py: the script ended itself with 3"),
        ("import nowhere", "train.py", "train.py: ModuleNotFoundError: No module named 'nowhere'"),
        ("x = 1", "train.py:build", "train.py:build: there is no such function; write `def build(): return model, example_inputs`"),
        ("def build(): return 3", "train.py:build", "train.py:build returned int; return (model, example_inputs)"),
        ("import torch\ndef build(): return torch.nn.Linear(2, 2), torch.ones(1, 2)", "train.py:build", "Linear has no modules inside"),
        (
            "import torch\ndef build(): return torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(1, 3)",
            "train.py:build",
            "mat1 and mat2 shapes cannot be multiplied (1x3 and 2x2)",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "train.py",
            "train.py: ended with signal 9 and said nothing; that is often",
        ),
        (
            "import torch; from torch import nn\na, b = nn.Linear(2, 2), nn.Linear(2, 2)\n"
            "o = torch.optim.SGD([*a.parameters(), *b.parameters()], 1)\nb(a(torch.ones(1, 2))).sum().backward(); o.step()",
            "train.py",
            "train.py calls 2 modules one by one (Linear, Linear); put them into one",
        ),
    ],
)
def test_what_cannot_be_profiled_is_told_in_a_sentence(tmp_path: Path, text: str, target: str, line: str) -> None:
    code, printed, told = run(tmp_path, text, target)
    assert code == 2 and "Traceback" not in told and printed == ""
    assert line in told and len(told.splitlines()) == 1


def test_a_script_that_never_trains_is_ended(tmp_path: Path) -> None:
    code, _, told = run(tmp_path, "import time; time.sleep(600)", "train.py", "--deadline", "3")
    assert code == 2
    assert "--deadline 3: train.py had no training step within 3 s; give more, a smaller data set, or a function: train.py:build" in told


def test_the_script_gets_its_own_arguments(tmp_path: Path) -> None:
    text = (
        BLOCKS + "\nimport sys\nif '--wide' not in sys.argv: raise SystemExit(f'arguments {sys.argv[1:]}')\n" + SCRIPT.partition(BLOCKS)[2]
    )
    found = profile(tmp_path, text, "train.py", "--", "--wide")
    assert len(found["nodes"]) == 6


@pytest.mark.rotating
@pytest.mark.parametrize("template", ["transformers", "lightning", "accelerate"])
def test_scripts_of_training_libraries_need_no_change(tmp_path: Path, template: str) -> None:
    code, output = warm.run(tmp_path, ["init", "job", "--template", template])
    assert code == 0, output
    code, _, told = plan(tmp_path, "job/train.py", "--save", "p.json", preloaded=IMPORTS)
    assert code == 0, told
    found = json.loads((tmp_path / "p.json").read_text())
    assert len(found["nodes"]) >= 3 and found["samples"] in (32, 64)
    assert all(node["outputs"] for node in found["nodes"][:-1])
