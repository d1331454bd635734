"""Limits of runPolicy.failureRules, as rules.py has those of all else."""

from __future__ import annotations

from psjob_operator.api.fieldrule import FieldRule, between, matching, sized

CAUSE = "^[A-Za-z][A-Za-z0-9]{0,62}$"
FAILURE_RULES, EXIT_CODES, SIGNALS, REASONS = 20, 64, 16, 16
"""The longest lists of runPolicy.failureRules, and in one of its rules."""


def failure_rules() -> tuple[FieldRule, ...]:
    """Every row about them."""
    return (
        between("spec.runPolicy.failureRules[].exitCodes.values[]", 1, 255, "0 is success, and no process ends with more than 255"),
        between("spec.runPolicy.failureRules[].signals[]", 1, 64, "such as 11 for SIGSEGV"),
        matching(
            "spec.runPolicy.failureRules[].reasons[]",
            CAUSE,
            "must be one word of 1 to 63 letters and digits",
            "such as OOMKilled, Evicted or Error; status.restarts.causes has those that were seen",
        ),
        sized("spec.runPolicy.failureRules", 0, FAILURE_RULES, "join those with one action"),
        sized("spec.runPolicy.failureRules[].exitCodes.values", 1, EXIT_CODES, "name the others with NotIn, or in a further rule"),
        sized("spec.runPolicy.failureRules[].signals", 0, SIGNALS, "name the others in a further rule"),
        sized("spec.runPolicy.failureRules[].reasons", 0, REASONS, "name the others in a further rule"),
        FieldRule(
            "spec.runPolicy.failureRules[]",
            lambda rule: bool(rule.get("exitCodes") or rule.get("signals") or rule.get("reasons")),
            "must have exitCodes, signals or reasons",
            "a rule that matches every failure would hide those after it; say which failures it is for",
            cel=("has(self.exitCodes) || (has(self.signals) && self.signals.size() > 0) || (has(self.reasons) && self.reasons.size() > 0)"),
        ),
    )
