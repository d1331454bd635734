"""What a script of another framework needs before psjob can train with it: no manifest says that."""

from __future__ import annotations

from psjob_client.convert.draft import Draft


def note(draft: Draft, framework: str) -> None:
    """Tell of the script."""
    if framework != "PyTorch":
        draft.note(
            "script", framework, "psjob trains PyTorch models alone: port model and loop to PyTorch, and take an image that has torch"
        )
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
