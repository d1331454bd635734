"""Scripts of trainers in a job and under DDP, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.frameworks import IMPORTS, OFFLINE
from tests.scripts.cells import scripts_in
from tests.support import warm

HERE = Path(__file__).parent / "scripts"
CELLS = scripts_in(HERE / "cells")
WORKERS, SHARDS = 2, 2
TOLERANCE = 1e-5
SECONDS = 280.0
"""For what takes a few, on a busy machine."""


def job(folder: Path, words: Sequence[str], spec: dict[str, Any] | None = None) -> Path:
    container = {"name": "worker", "image": "none", "command": ["python", str(HERE / words[0]), *words[1:]]}
    whole = {
        "training": {"mode": "sync", "seed": 0},
        "shards": {"replicas": SHARDS},
        "workers": {"replicas": WORKERS, "template": {"spec": {"containers": [container]}}},
        "checkpoint": {"periodSeconds": 3600},
        **(spec or {}),
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps({"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "job"}, "spec": whole}))
    return path


class Run:
    """A job that has ended."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        faults: Sequence[str] = (),
        spec: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir()
        self.folder = folder
        argv = ["run", str(job(folder, words, spec)), "--no-progress", "--summary", "summary.json", "--history", "history.jsonl"]
        for fault in faults:
            argv += ["--fault", fault]
        self.code, self.output = warm.run(folder, argv, {**OFFLINE, **(environment or {})}, SECONDS, IMPORTS)
        self.summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}

    def workers(self) -> list[str]:
        """The log of each worker."""
        return [path.read_text() for path in sorted(self.folder.glob(".psjob/*/logs/*worker*"))]

    def weights(self) -> dict[str, torch.Tensor]:
        assert self.code == 0, self.output[-4000:]
        (path,) = self.folder.glob(".psjob/*/final.safetensors")
        return load_file(path)


def resumed(folder: Path, words: Sequence[str], fault: str, every: int = 4) -> tuple[Run, Run]:
    """A run, and one with this fault that came to the same steps and the same bits after a restart."""
    whole = Run(folder / "whole", words)
    killed = Run(folder / "killed", words, [fault], {"checkpoint": {"periodSeconds": 3600, "everySteps": every}})
    assert whole.code == 0 and killed.code == 0, killed.output[-4000:]
    assert killed.summary["restarts"], killed.output[-4000:]
    assert killed.summary["steps"] == whole.summary["steps"]
    assert killed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    return whole, killed


def alone(folder: Path, *words: str) -> str:
    """Output of a script outside a job."""
    folder.mkdir(exist_ok=True)
    code, output = warm.call(folder, "tests.frameworks.alone", words, OFFLINE, SECONDS, IMPORTS)
    assert code == 0, output[-4000:]
    return output


def with_ddp(folder: Path, words: Sequence[str]) -> tuple[dict[str, torch.Tensor], str]:
    folder.mkdir()
    argv = [str(WORKERS), "weights", str(HERE / words[0]), *words[1:]]
    code, output = warm.call(folder, "tests.frameworks.gloo", argv, OFFLINE, SECONDS, IMPORTS)
    assert code == 0, output[-4000:]
    return load_file(folder / "weights"), output


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    assert found
    for key, value in found.items():
        assert torch.allclose(value, wanted[key], rtol=tolerance, atol=tolerance), f"{key}: {float((value - wanted[key]).abs().max()):.3g}"
