"""What a checkpoint holds of its workers: their resume records, and what rank 0 gave when the run began."""

from __future__ import annotations

from pathlib import Path

from psjob.checkpoint import files
from psjob.checkpoint.manifest import Manifest
from psjob.layout import memory

RECORD = "record."
INITIAL = "initial"


def read_records(folder: Path, made: Manifest) -> dict[int, bytes]:
    """The resume records a manifest holds, by rank. Raises Damage or CheckpointProblem."""
    if made.records is None:
        return {}
    names = [name for name in made.records.tensors if name.startswith(RECORD)]
    tensors = files.read_blocks(folder / made.records.name, names, made.records)
    return {int(name.removeprefix(RECORD)): bytes(memory.view(tensor)) for name, tensor in tensors.items()}


def read_initial(folder: Path, made: Manifest) -> bytes:
    """What rank 0 gave when the run began, where the manifest has it; else empty. Raises Damage or CheckpointProblem."""
    if made.records is None or INITIAL not in made.records.tensors:
        return b""
    return bytes(memory.view(files.read_blocks(folder / made.records.name, [INITIAL], made.records)[INITIAL]))
