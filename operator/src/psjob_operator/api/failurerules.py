"""Limits of runPolicy.failureRules, as rules.py has those of all else."""

from __future__ import annotations

from psjob_operator.api.fieldrule import FieldRule, between, matching, sized

CAUSE = "^[A-Za-z][A-Za-z0-9]{0,62}$"
CONDITION = "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
EVERY_POD = frozenset({"PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"})
"""Conditions that every pod has, whatever becomes of it."""
FAILURE_RULES, EXIT_CODES, SIGNALS, REASONS, POD_CONDITIONS = 20, 64, 16, 16, 20
"""The longest lists of runPolicy.failureRules, and in one of its rules."""


def failure_rules() -> tuple[FieldRule, ...]:
    """Every row about them."""
    return (
        between("spec.runPolicy.failureRules[].onExitCodes.values[]", 1, 255, "0 is success, and no process ends with more than 255"),
        between("spec.runPolicy.failureRules[].signals[]", 1, 64, "such as 11 for SIGSEGV"),
        matching(
            "spec.runPolicy.failureRules[].reasons[]",
            CAUSE,
            "must be one word of 1 to 63 letters and digits",
            "such as OOMKilled, Evicted or Error; status.restarts.causes has those that were seen",
        ),
        matching(
            "spec.runPolicy.failureRules[].onPodConditions[].type",
            CONDITION,
            "must be a pod condition's type: a word, with a domain before it or without",
            "such as DisruptionTarget or example.com/ConfigIssue",
        ),
        FieldRule(
            "spec.runPolicy.failureRules[].onPodConditions[].type",
            lambda name: name not in EVERY_POD,
            "must not be a condition that every pod has: " + ", ".join(sorted(EVERY_POD)),
            "name one that says why the pod was lost, such as DisruptionTarget",
            cel="!(self in [" + ", ".join(f"'{name}'" for name in sorted(EVERY_POD)) + "])",
        ),
        sized("spec.runPolicy.failureRules", 0, FAILURE_RULES, "join those with one action"),
        sized("spec.runPolicy.failureRules[].onExitCodes.values", 1, EXIT_CODES, "name the others with NotIn, or in a further rule"),
        sized("spec.runPolicy.failureRules[].onPodConditions", 0, POD_CONDITIONS, "name the others in a further rule"),
        sized("spec.runPolicy.failureRules[].signals", 0, SIGNALS, "name the others in a further rule"),
        sized("spec.runPolicy.failureRules[].reasons", 0, REASONS, "name the others in a further rule"),
        FieldRule(
            "spec.runPolicy.failureRules[]",
            lambda rule: rule.get("per") != "Process" or rule.get("action") == "Count",
            "must have action: Count where per is Process",
            "the other actions count nothing; leave per out",
            cel="!has(self.per) || self.per != 'Process' || self.action == 'Count'",
            about="per",
        ),
        FieldRule(
            "spec.runPolicy.failureRules[]",
            lambda rule: any(rule.get(name) for name in ("onExitCodes", "onPodConditions", "signals", "reasons")),
            "must have onExitCodes, onPodConditions, signals or reasons",
            "a rule that matches every failure would hide those after it; say which failures it is for",
            cel="has(self.onExitCodes) || "
            + " || ".join(f"(has(self.{name}) && self.{name}.size() > 0)" for name in ("onPodConditions", "signals", "reasons")),
        ),
    )
