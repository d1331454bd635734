"""What a run is made of until it ends, whatever operator serves it: stored with the first intent, read from then on."""

from __future__ import annotations

from psjob_operator.api.status import Pinned
from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.contract import CONFIG_FORMAT, CONFIG_FORMATS, WIRE, WIRES
from psjob_operator.plan.facts import Facts

UNPINNED_FORMAT, UNPINNED_WIRE = 1, 1
"""Of runs whose operator stored no pins."""


def pinned(facts: Facts) -> Pinned:
    """What every process and the config of this run are made of. What the status does not say is as in the pods that are there; of a run
    without pods it is this operator's."""
    kept = facts.stored.pinned or Pinned()
    begun = not facts.first_seen and bool(facts.known)
    return Pinned(
        runtime_image=kept.runtime_image or (_image(facts) if facts.snapshot.spec.injection == "auto" else None),
        config_format=kept.config_format or (UNPINNED_FORMAT if begun else CONFIG_FORMAT),
        wire=kept.wire or (UNPINNED_WIRE if begun else WIRE),
        container=kept.container or (container_of(facts.snapshot.spec.workers.template, TRAINED) or {}).get("name"),
    )


def another_version(facts: Facts) -> str:
    """Why nothing of this run is made here: it was begun by a version that this operator does not know. Empty where it does."""
    kept = facts.stored.pinned or Pinned()
    if kept.config_format in (None, *CONFIG_FORMATS) and kept.wire in (None, *WIRES):
        return ""
    theirs, ours = _named((kept.config_format or CONFIG_FORMAT,), (kept.wire or WIRE,)), _named(CONFIG_FORMATS, WIRES)
    return (
        f"this run has {theirs}, this operator serves {ours}: what runs goes on, nothing lost is replaced;"
        " install an operator of the version that began it, or of the next one"
    )


def _named(config_formats: tuple[int, ...], wires: tuple[int, ...]) -> str:
    return f"config format {' or '.join(map(str, config_formats))} and wire {' or '.join(map(str, wires))}"


def _image(facts: Facts) -> str | None:
    """Of the oldest process that lives, else of the oldest one."""
    found = [pod for pod in facts.known if pod.runtime_image]
    oldest = min(found, key=lambda pod: (pod.gone or pod.exit is not None, pod.created, pod.name), default=None)
    return (oldest.runtime_image if oldest is not None else facts.snapshot.runtime_image) or None
