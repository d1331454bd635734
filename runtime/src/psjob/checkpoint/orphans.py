"""What void cuts and earlier lives have left in a run's folder."""

from __future__ import annotations

import os
from pathlib import Path

from psjob.checkpoint import claim, manifest
from psjob.checkpoint.problems import CheckpointProblem, Damage, explain


def sweep(folder: Path, view: int, before: int) -> list[str]:
    """Remove what cuts below number `before` have left and no manifest lists, of whatever view; returns what was to go.

    Nothing is removed where a manifest cannot be read, for what it lists is not known, and where the folder holds another run too. Raises
    Fenced where a higher view than `view` has claimed the run, CheckpointProblem where the folder cannot be listed.
    """
    claim.check(folder, view)
    listed: set[str] = set()
    runs: set[str] = set()
    for _, _, name in manifest.listing(folder):
        try:
            made = manifest.read(folder, name)
        except Damage:
            continue  # nobody can go on from it
        except CheckpointProblem:
            return []
        runs.add(made.run)
        listed.update(fact.name for fact in made.listed())
    if len(runs) > 1:
        return []
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise explain(error, "list the folder", folder) from error
    gone = [name for name in names if (age := manifest.age_of(name)) is not None and age[1] < before and name not in listed]
    for name in gone:
        manifest.remove(folder, name)
    return gone
