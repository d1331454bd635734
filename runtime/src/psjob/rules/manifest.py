"""What a manifest itself says of a job's rule: its name, and numbers that no optimizer of a script has. Pure.

A worker reads them there for its optimizer. A shard reads them there too, and takes no other of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping

from psjob import contract, rules
from psjob.rules.base import Hyperparameters
from psjob.rules.options import checked_options

OUTER = "outer-nesterov"
"""The rule of mode local where the manifest names none."""


def of_manifest(wanted: str, workers: int, options: Mapping[str, float]) -> Hyperparameters:
    """The numbers of `training.updateRule` that the manifest gives, or that follow from it. Raises ValueError naming one that cannot be."""
    known = contract.UPDATE_RULES[wanted]
    given = {**({"every": float(workers)} if "every" in known else {}), **options}
    checked = checked_options(rules.named(wanted), known, given, "training.ruleOptions", "updateRule")
    return {**checked, "workers": float(workers)} if wanted == "adam-async" else checked
