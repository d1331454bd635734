"""docs/compatibility.md: what goes with what, of the runtime's one table."""

from __future__ import annotations

import re

from psjob.api.compatibility import CLASHES

HEAD = """# What does not go together

psjob refuses a script that asks for two features that it does not combine. `attach` ends the worker with a sentence that names both.
A manifest is checked before: its [rules](manifest/index.md) say what no job can have. Which optimizer a rule takes is on the
[page of rules](rules/index.md).

A value … is each value that the last column does not name. `attach` reads the same table, `psjob/api/compatibility.py`.

| this | does not go with | because | so |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page as Markdown, the same on every call."""
    rows = [(clash.feature, clash.beside, clash.why or "–", clash.take) for clash in CLASHES]
    return HEAD + "".join(f"| {' | '.join(map(_shown, row))} |\n" for row in rows)


def _shown(text: str) -> str:
    """A format without the values of a job: 'training.mode {job.mode}' is 'training.mode …'."""
    plain = text.replace("{job.processes} processes", "several processes").replace("{features.pairs} attached", "several attached")
    plain = plain.replace("{features.library}", "Accelerate and Lightning, imported by the script,")
    return re.sub(r"\{job[^}]*\}", "…", re.sub(r"( of| )?(\{features[^}]*\})+", "", plain))
