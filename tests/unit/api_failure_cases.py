"""Rules of runPolicy.podFailurePolicy.rules to refuse and to take."""

from __future__ import annotations

from typing import Any

from tests.unit.api_manifest import Case, refused

RULES = "spec.runPolicy.podFailurePolicy.rules"
FIRST = f"{RULES}[0]"


def _rule(**given: Any) -> dict[str, Any]:
    return {RULES: [{"action": "FailJob", **given}]}


def _codes(*values: int, operator: str = "In") -> dict[str, Any]:
    return _rule(onExitCodes={"operator": operator, "values": list(values)})


def _conditions(*types: str) -> dict[str, Any]:
    return _rule(onPodConditions=[{"type": name} for name in types])


_ANY = {"action": "FailJob", "onReasons": ["Error"]}
_MANY = "Too many"

FAILURES_REFUSED: list[Case] = [
    refused("rules-21", RULES, [_ANY] * 21, "must have 0..20 items; ", server_sentence=_MANY),
    Case("rule-of-all", _rule(), FIRST, "must have onExitCodes, onPodConditions, onSignals or onReasons; a rule that matches every"),
    Case("rule-of-nothing", _rule(onSignals=[], onReasons=[]), FIRST, "must have onExitCodes, onPodConditions, onSignals or onReasons; "),
    *(Case(f"rule-code-{code}", _codes(code), f"{FIRST}.onExitCodes.values[0]", "must be 1..255; ") for code in (-1, 0, 256)),
    Case("rule-no-codes", _codes(), f"{FIRST}.onExitCodes.values", "must have 1..64 items; "),
    Case("rule-codes-65", _codes(*range(1, 66)), f"{FIRST}.onExitCodes.values", "must have 1..64 items; ", server_sentence=_MANY),
    *(Case(f"rule-signal-{one}", _rule(onSignals=[9, one]), f"{FIRST}.onSignals[1]", "must be 1..64; such as 11") for one in (0, 65)),
    Case("rule-signals-17", _rule(onSignals=[9] * 17), f"{FIRST}.onSignals", "must have 0..16 items; ", server_sentence=_MANY),
    *(
        Case(f"rule-reason-{word!r}", _rule(onReasons=[word]), f"{FIRST}.onReasons[0]", "must be one word of 1 to 63 letters and digits; ")
        for word in ("", "OOM killed", "9", "über", "Error\n")
    ),
    Case("rule-reasons-17", _rule(onReasons=["Error"] * 17), f"{FIRST}.onReasons", "must have 0..16 items; ", server_sentence=_MANY),
    Case("rule-conditions-21", _conditions(*["A"] * 21), f"{FIRST}.onPodConditions", "must have 0..20 items; ", server_sentence=_MANY),
    *(
        Case(f"rule-condition-{name!r}", _conditions(name), f"{FIRST}.onPodConditions[0].type", sentence)
        for name, sentence in (
            ("", "must be a pod condition's type: "),
            ("Disruption Target", "must be a pod condition's type: "),
            ("Ready", "must not be a condition that every pod has: "),
        )
    ),
    Case(
        "rule-condition-status",
        _rule(onPodConditions=[{"type": "DisruptionTarget", "status": "yes"}]),
        f"{FIRST}.onPodConditions[0].status",
        'supported values: "True", "False", "Unknown"',
        server_sentence='Unsupported value: "yes"',
    ),
    Case("rule-per", _rule(action="Ignore", per="Process", onReasons=["Error"]), f"{FIRST}.per", "must have action: Count where"),
    Case(
        "rule-of-old",
        {RULES: [{"action": "Restart", "onReasons": ["Error"]}]},
        f"{FIRST}.action",
        'supported values: "FailJob", "Count", "Ignore"',
        server_sentence='Unsupported value: "Restart"',
    ),
    Case(
        "rule-of-shards",
        _rule(role="shards", onReasons=["Error"]),
        f"{FIRST}.role",
        'supported values: "shard", "worker", "any"',
        server_sentence='Unsupported value: "shards"',
    ),
]

FAILURES_PASSED: list[Case] = [
    *(Case(f"rules-{count}", {RULES: [_ANY] * count}) for count in (0, 20)),
    Case("rule-codes-64", _codes(*range(1, 65), operator="NotIn")),
    Case("rule-conditions", _conditions("DisruptionTarget", "example.com/Config-Issue", *"ABCDEFGHIJKLMNOPQR")),
    Case("rule-per-process", {RULES: [{"action": "Count", "per": "Process", "onReasons": ["Error"]}]}),
    Case("rule-codes-ends", _codes(1, 255)),
    Case("rule-whole", _rule(**_codes(3)[RULES][0] | {"role": "worker", "onSignals": [1, 64], "onReasons": ["Error", "a" * 63]})),
    Case("rule-largest", {RULES: [{"action": "Ignore", "onSignals": [11] * 16, "onReasons": ["Error"] * 16}] * 20}),
    Case("no-limits-of-a-role", {"spec.runPolicy.backoffLimitPerRole": {}}),
]
