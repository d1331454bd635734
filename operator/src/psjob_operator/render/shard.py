"""A shard's pod before what all pods get: the worker's image, guarded and probed, with the user's `shards.template` laid over it.

It runs the Python that the worker's command would start, with what that needs of the worker's environment. It has the worker's user, and
never more rights than the restricted level of Pod Security allows. `merge` lays a pod template over another as server-side apply does, by
the keys that the Pod API itself gives its lists.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psjob_operator.api import template
from psjob_operator.api.base import quantity
from psjob_operator.api.template import SERVING, Schema, asks_devices, container_of
from psjob_operator.contract import DATA_PORT, HEALTH_PATH, STARTED_PATH, STATUS_PORT
from psjob_operator.plan.objects import CHECKPOINTS, ConfigSource, volume
from psjob_operator.render.objects import HOSTNAME, LABEL_VOLUME_GROUP, Document, pods_of

VOLUME = "psjob-checkpoints"
SCRATCH_VOLUME, SCRATCH = "psjob-scratch", "/tmp"  # noqa: S108 (the folder of a container)
"""What a library of the image may write to, where the image itself is read-only; psjob writes nothing there."""
INHERITED = ("priorityClassName", "preemptionPolicy", "schedulerName")
"""Fields of the workers' pods that say when they run and who else waits."""
GRACE_SECONDS = 60
"""Workers leave first, then the last cut is written."""
START_ATTEMPTS = 3600
"""Seconds until a shard has heard the coordinator; one that finds none gives up before, with an exit code of its own. A restore comes
after, and is watched by the liveness probe, which follows its progress: it may take as long as it needs."""
LOST_NODE_SECONDS = 30
REQUESTS: Document = {"cpu": "500m", "memory": "1Gi"}
"""What a shard asks for where nobody says."""


PYTHON = re.compile(r"python[0-9.]*")
RUNNERS = frozenset({"uv", "conda", "mamba", "micromamba", "poetry", "pdm", "pipenv", "pixi"})
"""Programs whose `run` starts another one in an environment of theirs."""
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "composer", "ipython"})
"""Programs that a Python package installs beside the interpreter, and that run a script."""
WRAPPERS = frozenset({"env", "tini", "dumb-init"})
"""Programs that start the one after their options."""
VALUED = frozenset(
    {"-p", "--python", "--prefix", "-n", "--name", "--with", "--extra", "--group", "--package", "--project", "--directory", "--env-file"}
)
"""Options of runners whose value is the next word."""
INLINE = frozenset({"-s", "--script"})
"""uv makes an environment only for that script, which nothing else can be started in."""
ENVIRONMENT = re.compile(r"conda|mamba|venv|/envs?/")
"""Folders of an environment, whose programs have their Python beside them."""
HOME_OF_ROOT = "/root"
VARIABLES = re.compile(
    r"PATH|HOME|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON[A-Z]*"
    r"|CONDA_(PREFIX(_\d+)?|DEFAULT_ENV|EXE|PYTHON_EXE|SHLVL|ROOT|ENVS_PATH|ENVS_DIRS|PKGS_DIRS|OFFLINE)|CONDARC|MAMBA_(EXE|ROOT_PREFIX)"
    r"|UV_(PROJECT|PROJECT_ENVIRONMENT|PYTHON|PYTHON_(INSTALL_DIR|PREFERENCE|DOWNLOADS|BIN_DIR)|SYSTEM_PYTHON|MANAGED_PYTHON|NO_MANAGED_PYTHON"
    r"|CACHE_DIR|NO_CACHE|NO_SYNC|FROZEN|LOCKED|OFFLINE|ISOLATED|NO_CONFIG|CONFIG_FILE|WORKING_DIRECTORY|LINK_MODE|NO_DEV|NO_PROGRESS|TOOL_DIR)"
)
"""What decides which Python starts and what it can import, by name: the runners' other variables may hold credentials of an index."""
DEFAULT = "python3"
NOBODY = 65532
POWERS = ("privileged", "capabilities", "allowPrivilegeEscalation", "procMount")
"""What a worker may need for its GPUs or its network, and a shard never does."""
WORKERS = ("sysctls", "windowsOptions", "seLinuxOptions")
"""What else is not taken from a worker; of seLinuxOptions the level is, by which volumes are shared."""
PROFILES = ("seccompProfile", "appArmorProfile")
BINDING = "NET_BIND_SERVICE"
"""The one capability that the restricted level allows."""
TOLERATIONS, AFFINITY = "spec.tolerations", "spec.affinity"
ADDED = frozenset(
    f"{AFFINITY}.{kind}.{when}DuringSchedulingIgnoredDuringExecution"
    for kind in ("podAffinity", "podAntiAffinity")
    for when in ("required", "preferred")
)
"""Lists to which items are only added, though for Kubernetes they are one value: leaving out ours would break what they are for."""
Keys = tuple[Any, ...]


def shard_template(
    job: ConfigSource, volume_group: int | None, trained_name: str, user: int | None = NOBODY, asks_nothing: bool = False
) -> tuple[Document, Document]:
    """The template, and the container in it that serves. `volume_group`: of CreateProcess; `trained_name`: of the workers' container;
    `user`: of pod_security; `asks_nothing`: of Pods."""
    worker = job.spec.workers.template
    trained = container_of(worker, trained_name) or {}
    base: Document = {"metadata": {}, "spec": _spec(job, worker.get("spec") or {}, trained, volume_group, user)}
    over = copy.deepcopy(job.spec.shards.template or {})
    laid = container_of(over, SERVING)
    name = laid["name"] if laid and laid.get("name") else SERVING
    base["spec"]["containers"][0]["name"] = name
    # A template that speaks of the whole pod, and a LimitRange, say what a container may have.
    if not asks_nothing and not (over.get("spec") or {}).get("resources"):
        base["spec"]["containers"][0]["resources"] = {"requests": _asked(laid)}
    template: Document = merge_templates(base, over)
    keep_restricted(template["spec"], interpreter(trained.get("command") or []).of_the_images_user)
    return template, next(container for container in template["spec"]["containers"] if container["name"] == name)


def _spec(job: ConfigSource, worker: Document, trained: Document, volume_group: int | None, user: int | None) -> Document:
    python = interpreter(trained.get("command") or [])
    spec: Document = {
        "containers": [_container(job, trained, python)],
        "securityContext": pod_security(worker, trained, user, python.of_the_images_user),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "tolerations": [
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
            for taint in ("not-ready", "unreachable")
        ],
        "volumes": [{"name": VOLUME, **_volume(job)}, {"name": SCRATCH_VOLUME, "emptyDir": {}}],
    }
    if worker.get("imagePullSecrets"):
        spec["imagePullSecrets"] = copy.deepcopy(worker["imagePullSecrets"])
    # Else the scheduler preempts a shard for others while its workers keep their nodes, or waits for one half of a gang.
    spec |= {name: worker[name] for name in INHERITED if worker.get(name) is not None}
    if worker.get("runtimeClassName") and not asks_devices(worker):
        spec["runtimeClassName"] = worker["runtimeClassName"]
    if job.spec.shards.placement == "Colocated":  # it has no other node to go to
        spec["tolerations"] = tolerations(spec["tolerations"], copy.deepcopy(worker.get("tolerations") or []))
    if volume_group is not None:
        spec["affinity"] = _one_node(job, volume_group)
    elif job.spec.shards.placement == "Packed":
        spec["affinity"] = _few_nodes(job)
    if job.spec.shards.placement == "Spread":
        spec["topologySpreadConstraints"] = [_many_nodes(job)]
    return spec


def _asked(laid: Document | None) -> Document:
    """What a shard asks for where its template does not say: no more than the limit that the template sets."""
    limits = ((laid or {}).get("resources") or {}).get("limits") or {}
    return {name: limits[name] if _less(limits.get(name), amount) else amount for name, amount in REQUESTS.items()}


def _less(limit: Any, amount: str) -> bool:
    there, own = quantity(limit), quantity(amount)
    return there is not None and own is not None and there < own


def _container(job: ConfigSource, trained: Document, python: Interpreter) -> Document:
    container: Document = {
        "name": SERVING,
        "image": trained.get("image"),
        "command": [*python.words, "-m", "psjob.shard"],
        "env": variables(trained),
        "ports": [{"name": "data", "containerPort": DATA_PORT}, {"name": "status", "containerPort": STATUS_PORT}],
        "securityContext": container_security(trained, python, python.of_the_images_user),
        "volumeMounts": [{"name": VOLUME, "mountPath": CHECKPOINTS}, {"name": SCRATCH_VOLUME, "mountPath": SCRATCH}],
        "startupProbe": {
            "httpGet": {"path": STARTED_PATH, "port": STATUS_PORT},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": START_ATTEMPTS,
            "terminationGracePeriodSeconds": 1,
        },
        "livenessProbe": _liveness(job.spec.shards.progress_deadline_seconds),
    }
    if trained.get("imagePullPolicy"):
        container["imagePullPolicy"] = trained["imagePullPolicy"]
    if folder(trained):
        container["workingDir"] = folder(trained)
    return container


def _liveness(timeout: int) -> Document:
    """Kills a shard that has not answered for about `timeout` seconds; it is not asked to end, since it does not listen."""
    period = min(30, max(1, timeout // 3))
    return {
        "httpGet": {"path": HEALTH_PATH, "port": STATUS_PORT},
        "periodSeconds": period,
        "timeoutSeconds": min(period, 10),
        "failureThreshold": max(1, timeout // period),
        "terminationGracePeriodSeconds": 1,
    }


def _volume(job: ConfigSource) -> Document:
    given = job.spec.checkpoint.volume
    # Without checkpoints a user may choose where the folder lies that is lost with the pod.
    return dict(volume(job.name, job.spec) or (given.source() if given is not None else {"emptyDir": {}}))


def _one_node(job: ConfigSource, volume_group: int) -> Document:
    """Beside the other shards of its volume group; of a run that has no number yet (0) beside all of the run's."""
    number = {LABEL_VOLUME_GROUP: str(volume_group)} if volume_group else {}
    term = {"labelSelector": {"matchLabels": {**pods_of(job, "shard"), **number}}, "topologyKey": HOSTNAME}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _few_nodes(job: ConfigSource) -> Document:
    """Beside other shards of the run, where there is room."""
    term = {"labelSelector": {"matchLabels": pods_of(job, "shard")}, "topologyKey": HOSTNAME}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}}


def _many_nodes(job: ConfigSource) -> Document:
    """About as many of the run's shards on each node; a pod that ends is not counted, nor kept from starting."""
    return {
        "maxSkew": 1,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": pods_of(job, "shard")},
    }


@dataclass(frozen=True)
class Interpreter:
    """How a Python is started."""

    words: tuple[str, ...]
    """The program and its first arguments; those of Python follow."""

    @property
    def of_the_images_user(self) -> bool:
        """Only the user whom the image names can start it: it lies in root's home, or a runner writes into files of its own."""
        return self.writes or any(_within(word, HOME_OF_ROOT) for word in self.words)

    @property
    def writes(self) -> bool:
        """It is started by a runner, which writes into the image: locks, caches, an environment."""
        return _base(self.words[0]) in RUNNERS


def interpreter(command: Sequence[Any]) -> Interpreter:
    """The Python of the worker's `command`; the first `python3` on the PATH if it begins with none that can be seen from outside."""
    words = [str(word) for word in command]
    while words and _base(words[0]) in WRAPPERS:
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0]):
            words = words[1:]
    if not words:
        return Interpreter((DEFAULT,))
    if PYTHON.fullmatch(_base(words[0])):
        return Interpreter((words[0],))
    if _base(words[0]) in RUNNERS and "run" in words:
        return Interpreter(_run(words, words.index("run") + 1) or (DEFAULT,))
    folder = words[0].rpartition("/")[0]
    beside = folder.endswith("/bin") and ENVIRONMENT.search(folder)
    return Interpreter((f"{folder}/python",) if beside else (DEFAULT,))


def variables(trained: Document) -> list[Document]:
    """Those variables of the worker that its Python is found by, and whom they refer to as `$(NAME)`; only literal values."""
    given = {item.get("name"): item for item in trained.get("env") or [] if isinstance(item.get("value"), str)}
    wanted = {name for name in given if VARIABLES.fullmatch(str(name))}
    todo = list(wanted)
    while todo:
        referred = {name for name in re.findall(r"\$\(([^()]+)\)", given[todo.pop()]["value"]) if name in given}
        todo += sorted(referred - wanted)
        wanted |= referred
    return [{"name": name, "value": item["value"]} for name, item in given.items() if name in wanted]


def folder(trained: Document) -> str | None:
    """If the worker starts, if that lies in its image: a shard mounts none of the worker's volumes."""
    there = trained.get("workingDir")
    mounts = [str(mount.get("mountPath")) for mount in trained.get("volumeMounts") or []]
    inside = there and any(_within(str(there), mount) for mount in mounts)
    return str(there) if there and not inside else None


def _run(words: Sequence[str], at: int) -> tuple[str, ...] | None:
    """What a runner is told up to its program, and Python in the place of that; None where no Python runs there."""
    while at < len(words):
        word = words[at]
        if word in INLINE:
            return None
        if word in VALUED:
            at += 2
            continue
        if PYTHON.fullmatch(_base(word)):
            return (*words[: at + 1],)
        if word in ("-m", "--module") or word.endswith(".py") or _base(word) in LAUNCHERS:
            return (*words[:at], "python")
        at += 1
    return None


def _within(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def pod_security(worker: Document, trained: Document, user: int | None = NOBODY, of_the_image: bool = False) -> Document:
    """The worker pod's context. If neither it nor the container names a user but root, `user`: a shard needs no rights.

    `user`: None: the one whom the namespace gives (OpenShift); of its numbers none may be chosen here. `of_the_image`: only the image's
    own user can start the worker's Python, so that no other is named.
    """
    context = _taken(worker.get("securityContext"), of_the_image)
    own = _taken(trained.get("securityContext"), of_the_image)
    if not of_the_image and not any(word in context or word in own for word in ("runAsUser", "runAsNonRoot")):
        context["runAsNonRoot"] = True
        if user is not None:
            context |= {"runAsUser": user, "runAsGroup": context.get("runAsGroup", own.get("runAsGroup", user))}
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if "fsGroup" not in context and user is not None:
        # A fresh disk belongs to root; with a group of the pod's own its files can be written.
        said = (own.get("runAsGroup"), context.get("runAsGroup"), own.get("runAsUser"), context.get("runAsUser"))
        context["fsGroup"] = next((group for group in said if group), user or NOBODY)
        context.setdefault("fsGroupChangePolicy", "OnRootMismatch")
    return context


def container_security(trained: Document, python: Interpreter, of_the_image: bool = False) -> Document:
    """The trained container's context without its powers, and its image read-only if that Python can run so.

    `of_the_image`: as of pod_security.
    """
    taken = _taken(trained.get("securityContext"), of_the_image)
    return _powerless(taken) | ({} if python.writes else {"readOnlyRootFilesystem": True})


def keep_restricted(spec: Document, of_the_image: bool = False) -> None:
    """Whatever template was laid over the shard's pod, by a null too: no container has powers. The user is the template's to choose."""
    context = _without(spec.get("securityContext"), ())
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if not of_the_image and not any(word in context for word in ("runAsUser", "runAsNonRoot")):
        context["runAsNonRoot"] = True
    spec["securityContext"] = context
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        binds = BINDING in (((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or [])
        container["securityContext"] = _powerless(_without(container.get("securityContext"), POWERS))
        if binds:
            container["securityContext"]["capabilities"]["add"] = [BINDING]


def _taken(context: Document | None, of_the_image: bool) -> Document:
    """What a shard takes of a worker's context: root only if nobody else can start its Python."""
    taken = _without(context, (*POWERS, *WORKERS))
    level = ((context or {}).get("seLinuxOptions") or {}).get("level")
    if level:
        taken["seLinuxOptions"] = {"level": level}
    if not of_the_image:
        if taken.get("runAsUser") == 0:
            del taken["runAsUser"]
        if taken.get("runAsNonRoot") is False:
            del taken["runAsNonRoot"]
    return taken


def _without(context: Document | None, words: tuple[str, ...]) -> Document:
    """A copy without these words, nulls and profiles that confine nothing."""
    kept = {word: value for word, value in (context or {}).items() if word not in words and value is not None}
    return copy.deepcopy({word: value for word, value in kept.items() if word not in PROFILES or value.get("type") != "Unconfined"})


def _powerless(context: Document) -> Document:
    return context | {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def merge_templates(base: Any, over: Any, at: str = "") -> Any:
    """`over` laid over `base`; neither is changed where they are objects. A null takes the field away. `at`: where in a pod template they
    stand, such as spec.containers[]; empty: the whole template."""
    if isinstance(base, dict) and isinstance(over, dict) and at not in ATOMIC:
        merged = {key: value for key, value in base.items() if key not in over or over[key] is not None}
        for key, value in over.items():
            if value is not None:
                merged[key] = merge_templates(base[key], value, f"{at}.{key}" if at else key) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(over, list):
        if at in KEYED:
            return _by_keys(base, over, at)
        if at == TOLERATIONS:
            return [*(ours for ours in base if not any(_covers(theirs, ours) for theirs in over)), *over]
        return [*base, *(item for item in over if item not in base)] if at in SETS or at in ADDED else over
    return over


def tolerations(ours: list[Any], more: list[Any]) -> list[Any]:
    """`ours`, and of `more` what they do not speak of: no taint is tolerated twice, for two different times."""
    return [*ours, *(theirs for theirs in more if not any(_covers(it, theirs) for it in ours))]


def _by_keys(base: list[Any], over: list[Any], at: str) -> list[Any]:
    """Each item of `over` laid over the one of its keys. What has no such keys, or the same twice, stays for the API server to judge."""
    merged, places = list(base), {keys: place for place, item in enumerate(base) if (keys := _keys(item, at)) is not None}
    for item in over:
        place = places.pop(keys, None) if (keys := _keys(item, at)) is not None else None
        if place is None:
            merged.append(item)
        else:
            merged[place] = merge_templates(merged[place], item, f"{at}[]")
    return merged


def _keys(item: Any, at: str) -> Keys | None:
    if not isinstance(item, Mapping):
        return None
    keys = tuple(item.get(key) or DEFAULTS.get(at, {}).get(key) for key in KEYED[at])
    return keys if all(isinstance(key, str | int) for key in keys) else None


def _covers(theirs: Any, ours: Any) -> bool:
    """Whether the first toleration speaks of the same taint as the second: it takes its place, with its own time."""
    if not isinstance(theirs, Mapping) or not isinstance(ours, Mapping) or theirs.get("key") != ours.get("key"):
        return False
    if theirs.get("effect") not in (None, "", ours.get("effect")):
        return False
    return theirs.get("operator") == "Exists" or _asks(theirs) == _asks(ours)


def _asks(toleration: Mapping[str, Any]) -> tuple[Any, Any]:
    return toleration.get("operator") or "Equal", toleration.get("value") or ""


def _below(part: Schema, at: str = "") -> Iterator[tuple[str, Schema]]:
    """Each field, by its path such as spec.containers[].env."""
    for name, field in part.get("properties", {}).items():
        path = f"{at}.{name}".removeprefix(".")
        yield path, field
        is_list = "items" in field
        yield from _below(field["items"] if is_list else field, f"{path}[]" if is_list else path)


_FIELDS: Final = dict(_below(template.definition("PodTemplateSpec")))
KEYED: Final = {
    path: tuple(field["x-kubernetes-list-map-keys"]) for path, field in _FIELDS.items() if field.get("x-kubernetes-list-type") == "map"
}
"""Lists whose items differ by these keys."""
DEFAULTS: Final = {
    path: {key: str(item["default"]) for key in keys if "default" in (item := _FIELDS[path]["items"]["properties"][key])}
    for path, keys in KEYED.items()
}
"""Of a list with keys: what the API server fills in if an item leaves a key out."""
SETS: Final = frozenset(path for path, field in _FIELDS.items() if field.get("x-kubernetes-list-type") == "set")
"""Lists that hold each item once."""
ATOMIC: Final = frozenset(path for path, field in _FIELDS.items() if field.get("x-kubernetes-map-type") == "atomic")
"""Objects that are replaced whole."""
