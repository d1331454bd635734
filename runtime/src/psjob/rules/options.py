"""Numbers of a rule that a manifest gives beside the script's optimizer, checked with sentences that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob.rules.base import Hyperparameters, Rule, check_hyperparameters


def checked_options(rule: Rule, known: Sequence[str], given: Mapping[str, float], field: str, by: str) -> Hyperparameters:
    """Those that were given, as the rule takes them: a flag is 0 or 1 in a manifest.

    Args:
        rule: whose numbers they are.
        known: names of those that the manifest may give.
        given: by name.
        field: of the manifest that has them.
        by: the field of the manifest that names the rule.

    Raises:
        ValueError: a number that the rule does not know, or whose value cannot be.
    """
    for name in sorted(set(given) - set(known)):
        taken = "; that is the script's optimizer's" if name in rule.hyperparameters else ""
        raise ValueError(f"{field} has {name}, which {by} {rule.name} does not take{taken}; it takes {listed(known) or 'none'}")
    flags = {name for name in given if isinstance(rule.hyperparameters[name], bool)}
    for name in sorted(flags):
        if given[name] not in (0, 1):
            raise ValueError(f"{field}: {name} of {by} {rule.name} is 0 or 1, got {given[name]:g}")
    try:
        checked = check_hyperparameters(rule, {name: bool(value) if name in flags else value for name, value in given.items()})
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    return {name: checked[name] for name in given}


def listed(names: Sequence[str]) -> str:
    """As in a sentence: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
