"""What a script of another framework needs before psjob can train with it: no manifest says that."""

from __future__ import annotations

import re
from collections.abc import Sequence

from psjob_client.convert.draft import Draft

BACKEND = re.compile(r"--(?:dist[-_])?backend(?:=(?P<value>.*))?", re.DOTALL)
BACKENDS = frozenset({"nccl", "gloo", "mpi", "ucc", "hccl", "xccl"})


def note(draft: Draft, framework: str) -> None:
    """Tell of the script."""
    if framework != "PyTorch":
        draft.note(
            "script", framework, "psjob trains PyTorch models alone: port model and loop to PyTorch, and take an image that has torch"
        )
    if framework == "PyTorch":
        draft.note("script", None, "psjob convert train.py shows the edits as a diff, and --write makes them")
    draft.note(
        "script",
        None,
        "import psjob as ps; after model and optimizer are made: model, opt = ps.attach(model, opt); loop over ps.shard(loader)",
    )
    if framework == "PyTorch":
        draft.note(
            "script", None, "take out init_process_group and DistributedDataParallel; RANK and WORLD_SIZE become ps.rank() and ps.world()"
        )
        draft.note("script", None, "checkpoints are the job's: psjob saves model, optimizer and place in the data by itself")


def note_backend(draft: Draft, at: str, words: Sequence[str]) -> None:
    """Tell of `--backend nccl` in a script's arguments: it chose how a process group talks, and there is none."""
    for i, word in enumerate(words):
        found = BACKEND.fullmatch(word)
        value = (found["value"] if found["value"] is not None else next(iter(words[i + 1 : i + 2]), "")) if found else ""
        if value in BACKENDS:
            draft.note(
                at,
                f"{word.partition('=')[0]} {value}",
                "is kept, but chooses nothing: psjob starts no process group; take it out of script and manifest",
            )
