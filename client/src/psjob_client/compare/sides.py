"""What is compared: a manifest in several modes, or several manifests as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psjob_client.local.errors import BadInput
from psjob_operator.api.spec import Training
from psjob_operator.contract import ASYNC_OUTER_RULE, MODES

FIELDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sync": ("sync", {}),
    "backup": ("sync", {"backup_workers": "backupWorkers"}),
    **{mode: (mode, {field: field for field in fields}) for mode, fields in MODES.items() if mode != "sync"},
    "async": ("async", {}),
    "threshold": ("threshold", {"lag": "staleness"}),
    "local": ("local", {"inner_steps": "local.innerSteps", "quorum": "local.quorum", "grace": "local.graceSeconds"}),
    "local-async": ("local", {"inner_steps": "local.innerSteps"}),
}
"""By the simulator's word: the manifest's mode, and the manifest's field of each number of the word, the first one first."""
NOT_GIVEN = {"backupWorkers": "0", "staleness": "null", "splits": "null", "local": "null"}
"""What a field of another mode is set to."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    title: str
    manifest: Path
    settings: tuple[str, ...] = ()
    """Each `path=value`, laid over the manifest."""


def words(text: str) -> list[str]:
    """The modes of `sync,local:50,quorum=6,async`: a number with its name belongs to the mode before it. Raises BadInput."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in part and ":" in (found or [""])[-1] and ":" not in part:
            found[-1] += f",{part}"
        elif part.partition(":")[0] in FIELDS and not part.endswith(":"):
            found.append(part)
        else:
            raise BadInput(
                f"--modes {text}: {part!r} is no mode; there are {', '.join(FIELDS)}, with numbers as backup:1 or local:50,quorum=6"
            )
    return list(dict.fromkeys(found))


def side_of(word: str, manifest: Path, training: Training) -> Side:
    """The job of `manifest`, whose training is given, in the mode of `word`. Fields of other modes are taken out. Raises BadInput."""
    name, _, rest = word.partition(":")
    mode, fields = FIELDS[name]
    given = training.model_dump(by_alias=True, exclude_unset=True)
    settings = [f"spec.training.mode={mode}"]
    settings += [f"spec.training.{field}={value}" for field, value in _numbers(word, rest, fields).items()]
    kept = {field.partition(".")[0] for field in fields.values()}
    settings += [f"spec.training.{field}={none}" for field, none in NOT_GIVEN.items() if given.get(field) and field not in kept]
    if name == "backup" and not rest and not given.get("backupWorkers"):
        settings.append("spec.training.backupWorkers=1")
    if name == "local-async":
        settings += [f"spec.training.updateRule={ASYNC_OUTER_RULE}", *_given(given, "0", "local.quorum", "local.graceSeconds")]
    elif training.mode == "local":
        settings += _given(given, "null", "updateRule", "ruleOptions")
    return Side(word, manifest, tuple(settings))


def simulated(word: str, training: Training) -> str:
    """`word` with the manifest's numbers, where it has none itself and the manifest is of that mode. Seconds mean nothing there."""
    name, _, rest = word.partition(":")
    mode, fields = FIELDS[name]
    given = training.model_dump(by_alias=True, exclude_unset=True)
    if rest or mode != training.mode:
        return word
    found = {number: value for number, field in fields.items() if number != "grace" and (value := _at(given, field))}
    return f"{name}:" + ",".join(f"{number}={value:g}" for number, value in found.items()) if found else word


def _numbers(word: str, rest: str, fields: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for place, part in enumerate(rest.split(",") if rest else ()):
        number, equals, value = part.rpartition("=")
        if not equals and place == 0:
            number = next(iter(fields), "")
        if number not in fields or not value:
            names = ", ".join(fields) or "no numbers"
            raise BadInput(f"--modes {word}: {part!r} is no hyperparameter that a job in this mode takes; it has {names}")
        found[fields[number]] = value
    return found


def _given(given: Mapping[str, object], none: str, *fields: str) -> list[str]:
    """What takes those of `fields` out that are given."""
    return [f"spec.training.{field}={none}" for field in fields if _found(given, field) is not None]


def _at(given: Mapping[str, object], path: str) -> float | None:
    value = _found(given, path)
    return value if isinstance(value, int | float) else None


def _found(given: Mapping[str, object], path: str) -> object:
    value: object = given
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def titled(manifests: Sequence[Path]) -> list[Side]:
    """Manifests as they are, named after their files. Raises BadInput where two would have one name."""
    titles = [path.stem if len({other.stem for other in manifests}) == len(manifests) else str(path) for path in manifests]
    if len(set(titles)) < len(titles):
        raise BadInput("the same manifest is given twice; name it once, and its modes by --modes sync,async")
    return [Side(title, path) for title, path in zip(titles, manifests, strict=True)]
