"""What a worker of several processes does not go with yet."""

from __future__ import annotations

import sys

from psjob.process.config import Config
from psjob.process.errors import Refused

LIBRARIES = {"accelerate": "Accelerate", "lightning": "Lightning"}
"""They read torchrun's names too, and would make a group of all processes of the job."""


def check_processes(config: Config, overlap: bool, half: bool, tables: int) -> None:
    """Raise Refused where workers have several processes and the script wants what only one goes with."""
    if config.processes == 1:
        return
    library = next((name for module, name in LIBRARIES.items() if module in sys.modules), None)
    for there, what, remedy in (
        (overlap, "attach(…, overlap=True)", "leave it out"),
        (half, f"training.updateRule {config.update_rule}", "leave it out"),
        (bool(tables), "ps.Embedding and ps.Table", "take torch's nn.Embedding"),
        (config.mode == "local", "training.mode local", "take another mode"),
        (library is not None, library, "train with a plain loop"),
    ):
        if there:
            raise Refused(
                f"{what} does not go with several processes a worker yet, and spec.workers.processes is {config.processes}; {remedy}, or "
                "leave processes out and raise spec.workers.replicas"
            )
