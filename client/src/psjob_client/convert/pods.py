"""A pod template of another operator as one of psjob's: what psjob keeps for itself is taken out, with a note."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from decimal import ROUND_UP
from typing import Any

from psjob_client.convert import launcher
from psjob_client.convert.draft import Draft, items, mapping, note_backend
from psjob_client.problems import BadInput
from psjob_operator.api.base import UNITS, quantity
from psjob_operator.api.field_rule import shown
from psjob_operator.api.template import FOLDER, RESERVED, TRAINED
from psjob_operator.contract import ENV_PREFIX

GPUS = ("nvidia.com/gpu", "amd.com/gpu")
PLACEHOLDER = ("python", "train.py")
NAME_TAKEN = re.compile(r"psjob\.dev/")
OPERATORS_PORTS = frozenset({"pytorchjob-port", "tfjob-port", "mxjob-port", "caffe2-port"})
THEIRS = re.compile(r"\$[({]?(MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK|TF_CONFIG|MX_CONFIG|DMLC_\w+|PET_\w+)\b")
THEIR_NAMES = re.compile(r"(MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK|NODE_RANK|TF_CONFIG|MX_CONFIG|DMLC_\w+|PET_\w+)")


def convert_worker_template(draft: Draft, template: Mapping[str, Any], at: str, trained: str) -> dict[str, Any]:
    """`template`, which stands at path `at`, for workers; its container `trained`, or the only one, becomes `worker`."""
    made = _template(draft, template, at)
    pod = made["spec"]
    containers = pod.get("containers") or []
    if not containers:
        raise BadInput(f"{at}.spec.containers: must hold a container; correct the source")
    chosen = next((item for item in containers if item.get("name") == trained), containers[0])
    place = f"{at}.spec.containers[{containers.index(chosen)}]"
    if len(containers) > 1 and chosen.get("name") != trained:
        draft.note(f"{at}.spec.containers", None, f"none is called {trained}; training runs in the first")
    chosen["name"] = TRAINED
    _trained(draft, chosen, place)
    return made


def note_differences(draft: Draft, dropped: Mapping[str, Any], kept: Mapping[str, Any], at: str, trained: str) -> None:
    """Name what only the template at `at` says of the trained container, as all workers have the other one now: its env, field by field."""
    theirs, ours = _named(dropped, trained), _named(kept, trained)
    there = {str(entry.get("name")): entry for entry in items(ours, "env", f"{at}.env") if isinstance(entry, Mapping)}
    for entry in items(theirs, "env", f"{at}.env"):
        if not isinstance(entry, Mapping) or entry == there.get(str(entry.get("name"))) or THEIR_NAMES.fullmatch(str(entry.get("name"))):
            continue
        value = f"={entry['value']}" if "value" in entry else ""
        draft.note(
            f"{at}.spec.containers[].env", f"{entry.get('name')}{value}", "is dropped; add it to the env of the workers if all need it"
        )
    for key in sorted({*theirs, *ours} - {"env", "ports"}):
        if theirs.get(key) != ours.get(key):
            draft.note(f"{at}.spec.containers[].{key}", theirs.get(key), "differs from that of the workers, and is dropped")


def _named(template: Mapping[str, Any], trained: str) -> Mapping[str, Any]:
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    given = [item for item in containers if isinstance(item, Mapping)] if isinstance(containers, list) else []
    return next((item for item in given if item.get("name") == trained), given[0] if given else {})


def convert_shard_template(draft: Draft, template: Mapping[str, Any], at: str, trained: str) -> dict[str, Any] | None:
    """What a template of parameter servers says about shards: resources and where they run. None: nothing."""
    made = _template(draft, template, at)
    pod = made["spec"]
    containers = list(pod.pop("containers", None) or [])
    serving = next((item for item in containers if item.get("name") == trained), containers[0] if containers else {})
    place = f"{at}.spec.containers"
    resources = mapping(serving, "resources", f"{place}[].resources")
    limits = mapping(resources, "limits", f"{place}[].resources.limits")
    for name in [name for name in limits if name.endswith("/gpu")]:
        draft.note(f"{place}[].resources.limits.{name}", limits.pop(name), "shards compute on the CPU; ask for GPUs in the workers")
    resources = {**resources, "limits": limits} if limits else {key: value for key, value in resources.items() if key != "limits"}
    dropped = [name for name in serving if name not in ("name", "image", "resources", "imagePullPolicy")]
    if dropped:
        draft.note(place, ", ".join(sorted(dropped)), "shards run psjob's own program; only the resources of its container are taken")
    if len(containers) > 1:
        draft.note(place, f"{len(containers)} containers", "those beside the parameter server are left out of the shards")
    for name in ("volumes", "initContainers"):
        if pod.pop(name, None):
            draft.note(f"{at}.spec.{name}", None, "is left out of the shards, which run psjob's own program")
    if resources:
        pod["containers"] = [{"name": "shard", "resources": resources}]
    made = {key: value for key, value in made.items() if value}
    return made or None


def divide(draft: Draft, template: Mapping[str, Any], by: int, at: str) -> None:
    """Each pod becomes `by` pods of one process: its resources are shared out."""
    container = template["spec"]["containers"][0]
    container = next((item for item in template["spec"]["containers"] if item.get("name") == TRAINED), container)
    for kind, given in mapping(container, "resources", f"{at}.resources").items():
        if not isinstance(given, dict):
            continue
        for name, value in given.items():
            part = _share(value, by, entire="/" in name)
            if part is None:
                draft.note(f"{at}.resources.{kind}.{name}", value, f"is not divided among {by} workers: write what one process needs")
            else:
                given[name] = part


def gpus(template: Mapping[str, Any]) -> int:
    """GPUs that the trained container asks for."""
    containers: list[dict[str, Any]] = template["spec"]["containers"]
    container = next((item for item in containers if item.get("name") == TRAINED), {})
    resources = mapping(container, "resources", "resources")
    for kind in ("limits", "requests"):
        for name in GPUS:
            count = str(mapping(resources, kind, f"resources.{kind}").get(name, ""))
            if count.isdigit():
                return int(count)
    return 0


def launched(draft: Draft, template: Mapping[str, Any], at: str) -> launcher.Launch | None:
    """Take a launcher off the trained container's command; what it said. None: there is none."""
    container = next(item for item in template["spec"]["containers"] if item.get("name") == TRAINED)
    words = [*container["command"], *(container.get("args") or [])]
    note_backend(draft, f"{at}.args" if container.get("args") else f"{at}.command", words)
    line = _inside_shell(words)
    if line is not None:
        words = line
    if not launcher.is_launcher(words):
        text = " ".join(words)
        if re.search(r"\btorchrun\b|torch\.distributed\.(run|launch)", text):
            draft.note(f"{at}.command", text[:200], "starts torchrun inside a shell: write the command of one process, [python, train.py]")
        elif words[0].rpartition("/")[2] in launcher.OTHERS:
            why = launcher.OTHERS[words[0].rpartition("/")[2]]
            draft.note(f"{at}.command", text[:200], f"{why}: write the command of one process, [python, train.py]")
        return None
    found = launcher.taken_apart(words)
    container["command"] = list(found.command)
    container.pop("args", None)
    if found.env:
        container["env"] = [*(container.get("env") or []), *({"name": name, "value": value} for name, value in found.env)]
    for option, value, remedy in found.dropped:
        draft.note(f"{at}.command: {option}", value, remedy)
    return found


def _template(draft: Draft, template: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A copy with metadata and a pod that psjob takes, its containers as copies too."""
    metadata = mapping(template, "metadata", f"{at}.metadata")
    kept: dict[str, Any] = {}
    labels = {key: str(value) for key, value in mapping(metadata, "labels", f"{at}.metadata.labels").items() if not NAME_TAKEN.match(key)}
    for key in mapping(metadata, "labels", f"{at}.metadata.labels"):
        if NAME_TAKEN.match(key):
            draft.note(f"{at}.metadata.labels", key, "is psjob's own label; take another prefix")
    annotations = mapping(metadata, "annotations", f"{at}.metadata.annotations")
    kept |= {"labels": labels} if labels else {}
    kept |= {"annotations": annotations} if annotations else {}
    pod = _pod(draft, mapping(template, "spec", f"{at}.spec"), f"{at}.spec")
    for key in sorted(set(template) - {"metadata", "spec"}):
        draft.note(f"{at}.{key}", template[key], "is left out")
    return {**({"metadata": kept} if kept else {}), "spec": pod}


def _pod(draft: Draft, pod: dict[str, Any], at: str) -> dict[str, Any]:
    policy = pod.pop("restartPolicy", None)
    if policy not in (None, "Never"):
        draft.note(f"{at}.restartPolicy", policy, "psjob starts what failed again itself; spec.runPolicy.backoffLimit says how often")
    for name in ("hostname", "subdomain"):
        if pod.pop(name, None):
            draft.note(f"{at}.{name}", None, "psjob names its pods so that they find each other")
    if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
        draft.note(f"{at}.dnsPolicy", None, "became ClusterFirstWithHostNet, which pods need with hostNetwork: true")
    renamed: dict[str, str] = {}
    for kind in ("containers", "initContainers", "volumes"):
        made = []
        for i, item in enumerate(items(pod, kind, f"{at}.{kind}")):
            if not isinstance(item, Mapping):
                raise BadInput(f"{at}.{kind}[{i}]: Invalid value: {shown(item)}: must be an object; correct the source")
            copy = dict(item)
            name = str(copy.get("name", ""))
            if name.startswith(RESERVED):
                copy["name"] = name.removeprefix(RESERVED) or kind.rstrip("s")
                draft.note(f"{at}.{kind}[{i}].name", name, f"became {copy['name']}: names that begin with {RESERVED} are psjob's own")
                renamed |= {name: copy["name"]} if kind == "volumes" else {}
            made.append(copy)
        if made or kind in pod:
            pod[kind] = made
    for kind in ("containers", "initContainers"):
        for i, container in enumerate(pod.get(kind) or []):
            _container(draft, container, f"{at}.{kind}[{i}]", renamed)
    return pod


def _container(draft: Draft, container: dict[str, Any], at: str, renamed: Mapping[str, str]) -> None:
    for kind in ("command", "args"):
        if isinstance(container.get(kind), str):
            container[kind] = shlex.split(container[kind])
            draft.note(f"{at}.{kind}", None, "was one text; each word is an item of its own now: look at it once")
        elif container.get(kind) is not None:
            container[kind] = [str(word) for word in items(container, kind, f"{at}.{kind}")]
    env = []
    for entry in items(container, "env", f"{at}.env"):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise BadInput(f"{at}.env: Invalid value: {shown(entry)}: each must be an object with a name; correct the source")
        if entry["name"].startswith(ENV_PREFIX):
            draft.note(f"{at}.env", entry["name"], f"psjob sets what begins with {ENV_PREFIX} itself; take another name")
        elif THEIR_NAMES.fullmatch(entry["name"]):
            draft.note(
                f"{at}.env",
                entry["name"],
                "was for processes to find each other, which they do by themselves; ps.rank() and ps.world() say who is who",
            )
        else:
            value = entry.get("value")
            text = value if value is None or isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
            env.append({**entry, **({"value": text} if "value" in entry and text is not None else {})})
    if env:
        container["env"] = env
    else:
        container.pop("env", None)
    mounts = []
    for mount in items(container, "volumeMounts", f"{at}.volumeMounts"):
        path = str(mount.get("mountPath", "")) if isinstance(mount, Mapping) else ""
        if path == FOLDER or path.startswith(f"{FOLDER}/"):
            draft.note(f"{at}.volumeMounts", path, f"{FOLDER} is the folder of psjob's library; mount it elsewhere")
        elif isinstance(mount, Mapping):
            mounts.append({**mount, "name": renamed.get(str(mount.get("name")), mount.get("name"))})
    if mounts:
        container["volumeMounts"] = mounts
    else:
        container.pop("volumeMounts", None)


def _trained(draft: Draft, container: dict[str, Any], at: str) -> None:
    if container.pop("restartPolicy", None) not in (None, "Never"):
        draft.note(f"{at}.restartPolicy", None, "psjob starts what failed again itself")
    ports = [
        port
        for port in items(container, "ports", f"{at}.ports")
        if not (isinstance(port, Mapping) and str(port.get("name")) in OPERATORS_PORTS)
    ]
    if len(ports) < len(items(container, "ports", f"{at}.ports")):
        draft.note(f"{at}.ports", None, "the port by which processes met is left out")
    container.pop("ports", None)
    if ports:
        container["ports"] = ports
    if draft.wishes.image is not None:
        container["image"] = draft.wishes.image
    command = container.get("command")
    if not command:
        container["command"] = list(draft.wishes.command or PLACEHOLDER)
        if draft.wishes.command is None:
            draft.note(
                f"{at}.command",
                None,
                f"is left to the image: [{', '.join(PLACEHOLDER)}] stands for it; give --command with what the image starts",
            )
    words = [*container["command"], *(container.get("args") or [])]
    for found in sorted({match[0] for word in words for match in THEIRS.finditer(word)}):
        draft.note(
            f"{at}.command", found, "is a variable of the other operator: take the word out; ps.rank() and ps.world() say who is who"
        )
    order = ("name", "image", "imagePullPolicy", "command", "args", "env")
    ordered = {key: container[key] for key in order if key in container} | container
    container.clear()
    container.update(ordered)


def _inside_shell(words: Sequence[str]) -> list[str] | None:
    """The one torchrun command of `[sh, -c, …]`; None where it is not that simple."""
    if len(words) != 3 or words[0].rpartition("/")[2] not in ("sh", "bash") or words[1] not in ("-c", "-lc", "-ec"):
        return None
    text = words[2].strip()
    if len(re.sub(r"\\\s*\n", " ", text).splitlines()) > 1:
        return None
    try:
        return launcher.line_of_text(text)
    except BadInput:
        return None


def _share(value: Any, by: int, *, entire: bool) -> Any:
    """A `by`-th of a quantity, as a quantity; None where it is not to be divided."""
    number = quantity(value)
    if number is None:
        return None
    part = number / by
    if entire:
        return int(part) if part == int(part) else None
    unit = re.sub(r"[\d.]", "", str(value))
    if part == int(part) and not unit:
        return str(int(part))
    if unit in ("", "m"):
        return f"{int((part * 1000).to_integral_value(ROUND_UP))}m"
    for finer in dict.fromkeys((unit, "Mi" if unit.endswith("i") else "M", "Ki" if unit.endswith("i") else "k")):
        if (part / UNITS[finer]) == int(part / UNITS[finer]):
            return f"{int(part / UNITS[finer])}{finer}"
    return str(int(part.to_integral_value(ROUND_UP)))
