"""A job that has begun and whose spec this operator cannot read, as after a change of versions: nothing is done to it."""

from __future__ import annotations

from psjob_operator.plan.actions import Plan
from psjob_operator.plan.conditions import Say, conditions
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.settle import settle


def plan(facts: Facts) -> Plan:
    """Stalled, until an operator that can read the spec is back. Training itself needs none and goes on."""
    message = "; ".join(facts.snapshot.spec_problems)
    said = {kind: Say("False" if kind == "Ready" else "True", "TemplateInvalid", message) for kind in ("Ready", "Stalled")}
    kept = {it.type: Say(it.status, it.reason, it.message) for it in facts.stored.conditions if it.type == "CheckpointReady"}
    generation = facts.snapshot.generation
    update = {
        "observed_generation": generation,
        "conditions": conditions({**said, **kept}, facts.stored.conditions, generation, facts.now),
    }
    status, wake = settle(facts, facts.stored.model_copy(update=update))
    return Plan(status=status, intent=False, wake_at=wake)
