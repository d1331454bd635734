"""What a run is made of until it ends, whatever operator serves it: stored with the first intent, read from then on."""

from __future__ import annotations

from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import Pinned
from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.contract import CONFIG_FORMAT, CONFIG_FORMATS, WIRE, WIRES
from psjob_operator.plan import naming, resuming
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.templates import essence

UNPINNED_FORMAT, UNPINNED_WIRE = 1, 1
"""Of runs whose operator stored no pins."""
AUTHENTICATED_WIRE = 2
"""First version of the frames whose processes prove who they are: the runs before have no keys."""


def pinned(facts: Facts, afresh: bool) -> Pinned:
    """What every process and the config of this run are made of. What the status does not say is as in the pods that are there; of a run
    without pods it is this operator's. `afresh`: everything is started now. A resumed run then has no process of before, and is pinned
    anew, with keys of its own."""
    stored, resumed = facts.stored.pinned or Pinned(), afresh and facts.resuming
    kept = Pinned() if resumed else stored
    begun = not facts.first_seen and not resumed and bool(facts.known)
    wire = kept.wire or (UNPINNED_WIRE if begun else WIRE)
    key = (stored.key or 0) + 1 if resumed else kept.key or 1
    if key == facts.snapshot.key_taken and not facts.snapshot.mounts(naming.key(facts.snapshot.name, facts.snapshot.uid, key)):
        key += 1
    return Pinned(
        runtime_image=kept.runtime_image or (_image(facts, begun) if facts.snapshot.spec.injection == "auto" else None),
        config_format=kept.config_format or (UNPINNED_FORMAT if begun else CONFIG_FORMAT),
        wire=wire,
        container=kept.container or (container_of(facts.snapshot.spec.workers.template, TRAINED) or {}).get("name"),
        encryption=kept.encryption or (None if begun or kept.key else encryption(facts.snapshot.spec, facts.snapshot.auto_encryption)),
        templates=stored.templates or essence(facts.snapshot.spec),
        resumed_from=resuming.run_of(facts),
        key=None if wire < AUTHENTICATED_WIRE else key,
    )


def templates_changed(facts: Facts) -> str:
    """Why a run that was suspended does not go on; empty where its pods are what they were, wherever they are placed."""
    kept = facts.stored.pinned.templates if facts.stored.pinned is not None else None
    if facts.first_seen or kept is None or kept == essence(facts.snapshot.spec):
        return ""
    return (
        "a pod template was changed while the job was suspended, in more than labels, annotations and placement."
        " Set spec.suspend to true, put it back and resume, or make a new job with resumeFrom"
    )


def encryption(spec: JobSpec, auto: str) -> str:
    """Which streams of a run that begins now are encrypted, one of contract.ENCRYPTION. `auto`: what auto means here."""
    return auto if spec.training.encryption == "auto" else spec.training.encryption


def another_version(facts: Facts) -> str:
    """Why nothing of this run is made here: it was begun by a version that this operator does not know. Empty where it does."""
    now = pinned(facts, afresh=True)
    if now.config_format in CONFIG_FORMATS and now.wire in WIRES:
        return ""
    if now.wire is not None and now.wire < AUTHENTICATED_WIRE:
        return (
            "this run began without authentication: what runs goes on, nothing lost is replaced. Suspend and resume the job,"
            " and it goes on from its checkpoint with keys"
        )
    theirs, ours = _named((now.config_format or CONFIG_FORMAT,), (now.wire or WIRE,)), _named(CONFIG_FORMATS, WIRES)
    return (
        f"this run has {theirs}, this operator serves {ours}: what runs goes on, nothing lost is replaced."
        " Install an operator of the version that began it, or suspend and resume the job"
    )


def _named(config_formats: tuple[int, ...], wires: tuple[int, ...]) -> str:
    return f"config format {' or '.join(map(str, config_formats))} and wire {' or '.join(map(str, wires))}"


def _image(facts: Facts, begun: bool) -> str | None:
    """Of the oldest process that lives, else of the oldest one; of a run that begins now it is this operator's."""
    found = [pod for pod in facts.known if pod.runtime_image] if begun else []
    oldest = min(found, key=lambda pod: (pod.gone or pod.exit is not None, pod.created, pod.name), default=None)
    return (oldest.runtime_image if oldest is not None else facts.snapshot.runtime_image) or None
