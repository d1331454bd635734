"""Pod templates: which container trains or serves, what Kubernetes and the CRD know of them by type, and the rules that need it.

The CRD has types only of what a rule asks for (template_schema). The operator judges all of a template by the schema of pods that an API
server serves: podschema.json, which `python -m hack.podschema` reads from one (definition). What neither knows is kept as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from psjob_operator.api.base import quantity
from psjob_operator.api.field_rule import FieldRule, Json
from psjob_operator.contract import DATA_PORT, ENV_PREFIX, STATUS_PORT

Schema = dict[str, Any]
RESERVED = "psjob-"
"""Names of volumes and containers that begin so are psjob's own."""
WHOLE = re.compile(r"[0-9]+(\.0)?")
"""A number of GPUs, as a manifest may write it."""
SHELL = frozenset({"&&", "||", ">>", "2>&1"})
"""Words that mean something only to a shell."""
FOLDER = "/psjob"
"""Where the library lies in a worker."""
FOLDERS = (FOLDER, "/psjob-keys", "/psjob-secret")
"""If psjob mounts its library, the keys of a process and those of its run."""
NAMES = ("name", "generateName", "namespace")
"""Of a template's metadata: what psjob gives the pods itself."""
SYSTEMS = (
    "ownerReferences",
    "managedFields",
    "uid",
    "resourceVersion",
    "generation",
    "selfLink",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
"""Of a template's metadata: what only a pod that exists can have, or psjob's own word."""
COST = "over every word of a template it is above the cost that the API server grants the rules of one CRD"
OPEN = "the CRD keeps this part of a template, or of a volume, without a schema, and CEL sees only fields with one"
"""Why the API server does not say a rule."""
KEY_VOLUMES = ("psjob-keys", "psjob-secret")
KEY_SECRET = re.compile(r"[a-z][-a-z0-9]*-key-[0-9a-f]{8}-[0-9]+")
"""Name of the Secret of a run's keys, see plan/objects.py."""
TRAINED = "worker"
"""The container that is trained in, where a worker template has several."""
SERVING = "shard"
"""The container that serves, where a shard template has several."""


AUTO: Final = "auto"
MOST_PROCESSES: Final = 64
GPUS: Final = ("nvidia.com/gpu", "amd.com/gpu")
QUANTITY_FORMAT = "quantity"
"""Format of a value such as 512Mi, which OpenAPI has no word for."""
WHOLE_GPUS = "such as 1; a node's device plugin shares a GPU, by time slicing or MIG, and gives each part a whole number"


def template_rules() -> tuple[FieldRule, ...]:
    """Every rule of the templates."""
    workers, shards, stage = "spec.workers.template", "spec.shards.template", "spec.stages[].template"
    of_workers = (*_shared(workers), *_worker(workers), *_shared(stage), *_worker(stage))
    return (*of_workers, *_shared(shards), *_shard(shards), no_key_secret("spec.checkpoint.volume"))


def template_schema(role: str) -> Schema:
    """The structural schema of a worker's or a shard's template; `role` is "worker" or "shard"."""
    described = "What the pods are made of." if role == "worker" else "What is laid over the pods of the shards."
    spec = _open(described, _POD)
    if role == "worker":
        spec["required"] = ["containers"]
    template = _open("", {"metadata": _METADATA, "spec": spec})
    if role == "worker":
        template["required"] = ["spec"]
    return template


# ---- containers and processes ----------------------------------------------------------------------------------------------------


def container_of(template: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The container called `name`, or the only one; None where there is neither. The template's own dict, not a copy."""
    containers = (template.get("spec") or {}).get("containers") or []
    return chosen(containers, name)


def chosen(containers: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The same of a list of them."""
    if len(containers) == 1:
        return containers[0]
    return next((container for container in containers if container.get("name") == name), None)


def asks_devices(pod: Mapping[str, Any]) -> bool:
    """A container of this pod's spec asks for a device, such as a GPU: a resource with a domain in its name."""
    containers = [it for it in pod.get("containers") or () if isinstance(it, Mapping)]
    amounts = [part for it in containers for part in (it.get("resources") or {}).values() if isinstance(part, Mapping)]
    return bool(pod.get("resourceClaims")) or any("/" in str(name) for part in amounts for name in part)


def processes_of(given: int | str | None, template: Mapping[str, Any]) -> int:
    """The number that `spec.workers.processes` stands for; auto is the GPU limit of the container that is trained in, 1 without."""
    if given is None:
        return 1
    if isinstance(given, str):
        return gpu_limit(template) or 1
    return given


def gpu_limit(template: Any) -> int:
    """GPUs of one kind that the container is limited to; 0 for none, and for what is no number."""
    container = container_of(template, TRAINED) if isinstance(template, Mapping) else None
    limits = ((container or {}).get("resources") or {}).get("limits") or {}
    return max(_whole(limits.get(name)) for name in GPUS)


def _whole(value: Any) -> int:
    try:
        return max(0, int(value))
    except (TypeError, ValueError):
        return 0


# ---- the schema of Kubernetes ----------------------------------------------------------------------------------------------------


@cache
def kubernetes() -> str:
    """The version of Kubernetes whose pods these are, such as 1.37."""
    return str(_file()["kubernetes"])


@cache
def definition(name: str) -> Schema:
    """A definition such as PodTemplateSpec, with everything that it refers to in place. Parts are shared: change nothing in it."""
    made: Schema = _resolved(_file()["definitions"][name])
    return made


@cache
def volume_source() -> Schema:
    """A volume of a pod without its name."""
    whole = definition("Volume")
    sources = {name: part for name, part in whole["properties"].items() if name != "name"}
    return {**whole, "required": [], "properties": sources}


@cache
def _file() -> Schema:
    read: Schema = json.loads(resources.files("psjob_operator.api").joinpath("podschema.json").read_text())
    return read


def _resolved(part: Schema) -> Schema:
    own = {key: value for key, value in part.items() if key != "$ref"}
    if "$ref" in part:
        # Pods are finite: no definition of theirs holds itself.
        return {**definition(part["$ref"]), **own} | ({"format": QUANTITY_FORMAT} if part["$ref"] == "Quantity" else {})
    if "properties" in part:
        own["properties"] = {name: _resolved(child) for name, child in part["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if inner in part:
            own[inner] = _resolved(part[inner])
    return own


# ---- the part that CEL sees --------------------------------------------------------------------------------------------------------


def _open(description: str, properties: Schema) -> Schema:
    head = {"description": description} if description else {}
    return {**head, "type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}


def _text(description: str, longest: int) -> Schema:
    return {"description": description, "type": "string", "maxLength": longest}


def _list(description: str, most: int, items: Schema, *keys: str) -> Schema:
    """A list whose items differ by `keys`, as those of the Pod API do; without, one manager owns it whole."""
    kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)} if keys else {"x-kubernetes-list-type": "atomic"}
    return {"description": description, "type": "array", "maxItems": most, "items": items, **kind}


def _named(properties: Schema) -> Schema:
    return _with("name", properties)


def _with(key: str, properties: Schema) -> Schema:
    return {**_open("", properties), "required": [key]}


_METADATA = _open(
    "Labels, annotations and finalizers.",
    {
        "labels": {
            "description": "Labels; psjob.dev/ is reserved.",
            "type": "object",
            "maxProperties": 64,
            "additionalProperties": {"type": "string"},
        },
        "annotations": {
            "description": "Annotations; psjob.dev/ is reserved.",
            "type": "object",
            "maxProperties": 256,
            "additionalProperties": {"type": "string"},
        },
        **{name: _text("Reserved.", 253) for name in NAMES},
    },
)

_LIMITS = _open(
    "Limits by resource.",
    {name: {"description": "GPUs; for workers.", "x-kubernetes-int-or-string": True} for name in ("nvidia.com/gpu", "amd.com/gpu")},
)

_VARIABLE: Schema = {
    "name": _text("Its name.", 1024),
    "value": {"description": "Its value: text, so numbers in quotes.", "type": "string"},
}

_ENV = _list("Environment; PSJOB_ is reserved.", 1000, _named(_VARIABLE), "name")
_MOUNTS = _list(
    "Mounted volumes; /psjob is reserved.",
    100,
    _with("mountPath", {"mountPath": _text("Path in the container.", 4096)}),
    "mountPath",
)

_CONTAINER = _named(
    {
        "name": _text("Its name; psjob- is reserved.", 63),
        "command": _list("Program and its first arguments.", 1000, {"type": "string"}),
        "args": _list("Further arguments.", 10_000, {"type": "string"}),
        "env": _ENV,
        "resources": _open("Requests and limits, passed on as they are.", {"limits": _LIMITS}),
        "restartPolicy": _text("Only for init containers.", 32),
        "volumeMounts": _MOUNTS,
    }
)

_SPREAD = {"topologyKey": "Label of nodes.", "whenUnsatisfiable": "DoNotSchedule or ScheduleAnyway."}
_POD: Schema = {
    "containers": {**_list("The containers.", 16, _CONTAINER, "name"), "minItems": 1},
    "initContainers": _list(
        "Containers that run before; psjob- is reserved.",
        16,
        _named(
            {
                "name": _text("Its name; psjob- is reserved.", 63),
                "env": _ENV,
                "volumeMounts": _MOUNTS,
            }
        ),
        "name",
    ),
    "volumes": _list("Volumes; psjob- is reserved.", 200, _named({"name": _text("Its name; psjob- is reserved.", 63)}), "name"),
    "imagePullSecrets": _list("Secrets by which images are pulled.", 32, _named({"name": _text("Its name.", 253)}), "name"),
    "topologySpreadConstraints": _list(
        "How the pods are spread.",
        32,
        {
            **_open("", {name: _text(text, 317) for name, text in _SPREAD.items()}),
            "required": list(_SPREAD),
        },
        *_SPREAD,
    ),
    "ephemeralContainers": _list("Reserved.", 16, {"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
    "restartPolicy": _text("Never, or absent: psjob restarts what fails.", 32),
    "hostname": _text("Reserved.", 63),
    "subdomain": _text("Reserved.", 63),
    "hostNetwork": {"description": "Use the node's network; needs dnsPolicy: ClusterFirstWithHostNet.", "type": "boolean"},
    "dnsPolicy": _text("How the pod looks names up.", 32),
}


# ---- rules -------------------------------------------------------------------------------------------------------------------------


def _shared(template: str) -> tuple[FieldRule, ...]:
    pod = f"{template}.spec"
    return (
        *(
            FieldRule(
                f"{template}.metadata.{words}",
                lambda keyed: not any(key.startswith("psjob.dev/") for key in keyed),
                "must not have keys that begin with psjob.dev/",
                "those are psjob's own; take another prefix",
                cel="self.all(key, !key.startsWith('psjob.dev/'))",
            )
            for words in ("labels", "annotations")
        ),
        *(_reserved(f"{template}.metadata.{name}") for name in NAMES),
        FieldRule(
            f"{template}.metadata",
            lambda metadata: not any(metadata.get(word) for word in SYSTEMS),
            f"must not have {', '.join(SYSTEMS)}",
            "psjob and the API server give them to each pod; leave them out",
            obstacle=OPEN,
        ),
        FieldRule(
            f"{pod}.ephemeralContainers",
            lambda containers: not containers,
            "must be left out",
            "Kubernetes takes them only for a pod that exists; use kubectl debug, or write containers",
            cel="self.size() == 0",
        ),
        FieldRule(
            f"{pod}.restartPolicy",
            lambda policy: policy == "Never",
            "must be Never, or left out",
            "psjob restarts what failed; spec.runPolicy.backoffLimit says how often",
            cel="self == 'Never'",
        ),
        _reserved(f"{pod}.hostname"),
        _reserved(f"{pod}.subdomain"),
        FieldRule(
            pod,
            lambda spec: not spec.get("hostNetwork") or spec.get("dnsPolicy") == "ClusterFirstWithHostNet",
            "must be ClusterFirstWithHostNet with hostNetwork: true",
            "without it the pod cannot look up the others",
            cel="!has(self.hostNetwork) || !self.hostNetwork || (has(self.dnsPolicy) && self.dnsPolicy == 'ClusterFirstWithHostNet')",
            about="dnsPolicy",
        ),
        FieldRule(
            pod,
            lambda spec: spec.get("dnsPolicy") != "Default",
            "must not be Default",
            "the node's resolver does not know the other pods; leave it out",
            cel="!has(self.dnsPolicy) || self.dnsPolicy != 'Default'",
            about="dnsPolicy",
        ),
        FieldRule(
            pod,
            lambda spec: spec.get("dnsPolicy") != "None" or bool((spec.get("dnsConfig") or {}).get("nameservers")),
            "must not be None without dnsConfig.nameservers",
            "name the cluster's DNS, which knows the names of the other pods, or leave it out",
            about="dnsPolicy",
            obstacle=OPEN,
        ),
        *(
            FieldRule(
                f"{pod}.{what}resources",
                _within_limits,
                "must not have requests above their limits",
                "raise the limit, or lower the request; of devices and huge pages the two must be equal",
                obstacle=OPEN,
            )
            for what in ("", "containers[].", "initContainers[].")
        ),
        _not_ours(f"{pod}.containers[].name"),
        _not_ours(f"{pod}.initContainers[].name"),
        _not_ours(f"{pod}.volumes[].name"),
        *(
            FieldRule(
                f"{pod}.{containers}[].env[].name",
                lambda name: not name.startswith(ENV_PREFIX),
                f"must not begin with {ENV_PREFIX}",
                "psjob sets those; take another name",
                cel=f"!self.startsWith('{ENV_PREFIX}')",
            )
            for containers in ("containers", "initContainers")
        ),
        FieldRule(
            f"{pod}.containers[].env[].name",
            lambda name: name.isprintable() and name.isascii() and name != "" and "=" not in name,
            "must be printable ASCII without '=', and not empty",
            "a container cannot be started with any other name of a variable; rename it",
            obstacle=COST,
        ),
        FieldRule(
            f"{pod}.containers[].env[].value",
            lambda value: "\0" not in value,
            "must not hold a NUL character",
            "no process can be started with it; take it out",
            obstacle=COST,
        ),
        *(
            FieldRule(
                f"{pod}.containers[].{words}",
                lambda items: not any("\0" in item for item in items),
                "must not hold a NUL character",
                "no process can be started with it; take it out",
                obstacle=COST,
            )
            for words in ("command", "args")
        ),
        *(
            FieldRule(
                f"{pod}.{containers}[].volumeMounts[].mountPath",
                lambda path: not any(f"{path}/".startswith(f"{folder}/") for folder in FOLDERS),
                f"must not be in {', '.join(FOLDERS)}",
                "those are psjob's own; mount it elsewhere",
                cel=" && ".join(f"self != '{folder}' && !self.startsWith('{folder}/')" for folder in FOLDERS),
            )
            for containers in ("containers", "initContainers")
        ),
        *(
            FieldRule(
                f"{pod}.{containers}[].{volume}",
                lambda name: name not in KEY_VOLUMES,
                f"must not be {' or '.join(KEY_VOLUMES)}",
                "a process gets its own keys and no other; take another volume",
                obstacle=OPEN,
            )
            for containers in ("containers", "initContainers")
            for volume in ("volumeMounts[].name", "env[].valueFrom.fileKeyRef.volumeName")
        ),
        no_key_secret(template),
    )


def _within_limits(resources: Json) -> bool:
    asked, limits = (resources.get(part) if isinstance(resources, Mapping) else None for part in ("requests", "limits"))
    if not isinstance(asked, Mapping) or not isinstance(limits, Mapping):
        return True  # the API server says so when the pod is made
    both = [(str(name), quantity(amount), quantity(limits[name])) for name, amount in asked.items() if limits.get(name) is not None]
    return all(
        request is None or limit is None or request == limit or (request < limit and "/" not in name and not name.startswith("hugepages-"))
        for name, request, limit in both
    )


def _worker(template: str) -> tuple[FieldRule, ...]:
    pod = f"{template}.spec"
    trained = f"(self.containers.size() == 1 || c.name == '{TRAINED}')"
    return (
        FieldRule(
            pod,
            lambda spec: chosen(spec["containers"], TRAINED) is not None,
            f"must have a container named {TRAINED} where there are several",
            "training runs in that one; rename the container that runs the script",
            cel=f"self.containers.size() == 1 || self.containers.exists(c, c.name == '{TRAINED}')",
            about="containers",
        ),
        FieldRule(
            pod,
            lambda spec: bool((chosen(spec["containers"], TRAINED) or {"command": True}).get("command")),
            f"the container {TRAINED}, or the only one, must have a command",
            "what its image would start cannot be seen from outside; write it, such as command: [python, train.py]",
            cel=f"self.containers.all(c, !{trained} || (has(c.command) && c.command.size() > 0))",
            about="containers",
        ),
        FieldRule(
            pod,
            lambda spec: (chosen(spec["containers"], TRAINED) or {}).get("restartPolicy") in (None, "Never"),
            f"the container {TRAINED}, or the only one, must not have a restartPolicy other than Never",
            "psjob restarts what failed; leave it out",
            cel=f"self.containers.all(c, !{trained} || !has(c.restartPolicy) || c.restartPolicy == 'Never')",
            about="containers",
        ),
        FieldRule(
            f"{pod}.containers[].command",
            lambda words: not words or " " not in words[0] or words[0].startswith(("/", "./")),
            "must begin with a program, each argument an item of its own",
            "no shell splits it: write [python, train.py], not ['python train.py']",
            obstacle=COST,
        ),
        FieldRule(
            f"{pod}.containers[].resources.limits",
            lambda limits: all(WHOLE.fullmatch(str(number)) for name, number in limits.items() if _is_gpu(name)),
            "must ask for whole GPUs",
            WHOLE_GPUS,
            obstacle=OPEN,
        ),
        *(
            FieldRule(
                f"{pod}.containers[].{words}",
                lambda words: not SHELL.intersection(words),
                f"must not hold a word of the shell as an item: {' '.join(sorted(SHELL))}",
                "no shell reads it; write [sh, -c, 'python train.py && echo done'], or only [python, train.py]",
                obstacle=COST,
            )
            for words in ("command", "args")
        ),
    )


def _shard(template: str) -> tuple[FieldRule, ...]:
    pod = f"{template}.spec"
    serving = f"(self.containers.size() == 1 || c.name == '{SERVING}')"
    return (
        FieldRule(
            pod,
            lambda spec: not spec.get("containers") or chosen(spec["containers"], SERVING) is not None,
            f"must have a container named {SERVING} where there are several",
            "that one serves; rename it",
            cel=f"!has(self.containers) || self.containers.size() == 1 || self.containers.exists(c, c.name == '{SERVING}')",
            about="containers",
        ),
        FieldRule(
            pod,
            lambda spec: not any((chosen(spec.get("containers") or [], SERVING) or {}).get(word) for word in ("command", "args")),
            f"the container {SERVING}, or the only one, must not have command or args",
            "psjob says what a shard runs; leave them out",
            cel=(
                f"!has(self.containers) || self.containers.all(c, !{serving}"
                " || ((!has(c.command) || c.command.size() == 0) && (!has(c.args) || c.args.size() == 0)))"
            ),
            about="containers",
        ),
        FieldRule(
            pod,
            lambda spec: not any(_takes_our_port(it) for it in _beside_the_shard(spec)),
            f"must not have containerPort {DATA_PORT} or {STATUS_PORT} in a container beside the shard's",
            "the shard listens there; give that container another port",
            obstacle=OPEN,
        ),
        FieldRule(
            f"{pod}.containers[].resources.limits",
            lambda limits: not any(_is_gpu(name) for name in limits),
            "must not ask for GPUs",
            "shards compute on the CPU; ask for GPUs in spec.workers.template",
            cel="!has(self.nvidia__dot__com__slash__gpu) && !has(self.amd__dot__com__slash__gpu)",
        ),
        FieldRule(
            pod,
            lambda spec: not any(spec.get(word) for word in ("hostPID", "hostIPC")),
            "must not have hostPID or hostIPC",
            "a shard needs only its own processes and memory; leave them out",
            obstacle=OPEN,
        ),
        *(
            FieldRule(
                f"{pod}.{containers}[].securityContext",
                _is_restricted,
                "must not add powers: privileged, escalation, procMount, capabilities but NET_BIND_SERVICE, Unconfined profiles",
                "shards run under the restricted level; leave them out",
                obstacle=OPEN,
            )
            for containers in ("containers", "initContainers")
        ),
    )


def _beside_the_shard(spec: Mapping[str, Any]) -> list[Json]:
    containers = spec.get("containers") or []
    serving = chosen(containers, SERVING)
    return [*(it for it in containers if it is not serving), *(spec.get("initContainers") or [])]


def _takes_our_port(container: Json) -> bool:
    """Of another protocol it is another port."""
    ports = container.get("ports") if isinstance(container, Mapping) else None
    listed = [port for port in ports if isinstance(port, Mapping)] if isinstance(ports, list) else []
    return any(port.get("containerPort") in (DATA_PORT, STATUS_PORT) and port.get("protocol") in (None, "", "TCP") for port in listed)


def _is_restricted(context: Json) -> bool:
    if not isinstance(context, Mapping):
        return True  # the API server says so when the pod is made
    capabilities, profiles = context.get("capabilities"), (context.get("seccompProfile"), context.get("appArmorProfile"))
    added = (capabilities.get("add") if isinstance(capabilities, Mapping) else None) or []
    return (
        not any(context.get(word) for word in ("privileged", "allowPrivilegeEscalation"))
        and context.get("procMount") in (None, "", "Default")
        and all(name == "NET_BIND_SERVICE" for name in added)
        and not any(isinstance(profile, Mapping) and profile.get("type") == "Unconfined" for profile in profiles)
    )


def _reserved(at: str) -> FieldRule:
    return FieldRule(at, lambda name: name == "", "must be left out", "psjob names its pods itself", cel="self == ''")


def _not_ours(at: str) -> FieldRule:
    return FieldRule(
        at,
        lambda name: not name.startswith(RESERVED),
        f"must not begin with {RESERVED}",
        "those are psjob's own; take another",
        cel=f"!self.startsWith('{RESERVED}')",
    )


def no_key_secret(at: str) -> FieldRule:
    """No volume and no variable below `at` takes a Secret of a run's keys."""
    return FieldRule(
        at,
        lambda part: not _names_key(part),
        "must not name the Secret of a run's keys, <job>-key-<run>-<number>",
        "only psjob's own init container reads it; take it out",
        obstacle=OPEN,
    )


def _names_key(part: Json, above: str = "") -> bool:
    """Whether something below refers to such a Secret: by `secretName`, or by the name in a `secret`, `secretRef` or `secretKeyRef`."""
    if isinstance(part, Mapping):
        return any(_names_key(value, f"{above}.{key}") for key, value in part.items())
    if isinstance(part, list):
        return any(_names_key(value, above) for value in part)
    refers = above.lower().endswith((".secretname", "secret.name", "secretref.name", "secretkeyref.name"))
    return refers and isinstance(part, str) and KEY_SECRET.fullmatch(part) is not None


def _is_gpu(name: Json) -> bool:
    return isinstance(name, str) and (name.startswith("nvidia.com/") or name.endswith("/gpu"))
