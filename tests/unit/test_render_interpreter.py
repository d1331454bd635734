"""Which Python a shard runs, as whom, and with which of the worker's variables."""

from __future__ import annotations

from typing import Any

import pytest

from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.render.shard import HOME_OF_ROOT, interpreter
from tests.unit.plan_given import job
from tests.unit.rendered import rich, shard

HOME = f"{HOME_OF_ROOT}/.venv/bin"


def of(command: list[str], pod: dict[str, Any] | None = None, **container: Any) -> ObservedState:
    """A job whose workers run `command`."""
    trained = {"name": "only", "image": "i", "command": command, **container}
    return job(workers={"template": {"spec": {**(pod or {}), "containers": [trained]}}})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py", "python"),
        ("/usr/bin/python3.12 x", "/usr/bin/python3.12"),
        ("/opt/conda/bin/python -u train.py", "/opt/conda/bin/python"),
        (f"{HOME}/python train.py", f"{HOME}/python"),
        (".venv/bin/python train.py", ".venv/bin/python"),
        ("/usr/bin/env python train.py", "python"),
        ("env -u X A=1 python3.11 train.py", "python3"),
        ("env A=1 python3.11 train.py", "python3.11"),
        ("tini -s -- /opt/venv/bin/python train.py", "/opt/venv/bin/python"),
        ("uv run python train.py", "uv run python"),
        ("uv run train.py --lr 1", "uv run python"),
        ("/usr/local/bin/uv run --frozen --extra gpu -m train.main", "/usr/local/bin/uv run --frozen --extra gpu python"),
        ("uv run --python python3.12 --project /app python -u train.py", "uv run --python python3.12 --project /app python"),
        ("uv run --script train.py", "python3"),
        ("uv run train", "python3"),
        ("conda run -n python3 --no-capture-output python train.py", "conda run -n python3 --no-capture-output python"),
        ("/opt/conda/bin/conda run -p /envs/a torchrun train.py", "/opt/conda/bin/conda run -p /envs/a python"),
        ("micromamba run -n a python3 -m train", "micromamba run -n a python3"),
        ("poetry run python train.py", "poetry run python"),
        ("/opt/conda/bin/torchrun train.py", "/opt/conda/bin/python"),
        ("/opt/conda/envs/a/bin/my-train --fast", "/opt/conda/envs/a/bin/python"),
        ("/srv/app/.venv/bin/accelerate launch train.py", "/srv/app/.venv/bin/python"),
        ("torchrun train.py", "python3"),
        ("/usr/local/bin/torchrun train.py", "python3"),
        ("/app/venv/start.sh", "python3"),
        ("pythonic", "python3"),
        ("/bin/sh -c x", "python3"),
        ("env", "python3"),
    ],
)
def test_a_shard_runs_the_workers_python(command: str, words: str) -> None:
    assert " ".join(interpreter(command.split()).words) == words
    container = shard(of(command.split()))["spec"]["containers"][0]
    assert container["command"][4:] == [*words.split(), "-m", "psjob.shard"]


VARIABLES = [
    {"name": "PATH", "value": "$(TOOLS)/bin:/usr/bin"},
    {"name": "TOOLS", "value": "$(BASE)/tools"},
    {"name": "BASE", "value": "/opt"},
    {"name": "VIRTUAL_ENV", "value": "/opt/venv"},
    {"name": "CONDA_PREFIX", "value": "/opt/conda"},
    {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    {"name": "LD_LIBRARY_PATH", "value": "/opt/lib"},
    {"name": "UV_NO_SYNC", "value": "1"},
    {"name": "UV_INDEX_URL", "value": "https://user:secret@packages.example/simple"},
    {"name": "UV_PUBLISH_TOKEN", "value": "secret"},
    {"name": "UV_INDEX_PRIVATE_PASSWORD", "value": "secret"},
    {"name": "CONDA_TOKEN", "value": "secret"},
    {"name": "CONDA_CHANNEL_ALIAS", "value": "https://conda.example/t/secret/"},
    {"name": "MAMBA_AUTH", "value": "secret"},
    {"name": "PYTHON_KEYRING_PASSWORD", "value": "secret"},
    {"name": "HOME", "value": "/tmp"},
    {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
    {"name": "WANDB_API_KEY", "value": "secret"},
    {"name": "MYPATH", "value": "x"},
]


def test_a_shard_has_the_variables_that_its_python_is_found_by_and_no_others() -> None:
    snapshot = of(["python"], env=VARIABLES, workingDir="/app")
    container = shard(snapshot)["spec"]["containers"][0]
    given = {item["name"]: item["value"] for item in container["env"] if not item["name"].startswith("PSJOB_")}
    assert list(given) == ["PATH", "TOOLS", "BASE", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "UV_NO_SYNC", "HOME"]
    assert given["PATH"] == "$(TOOLS)/bin:/usr/bin" and container["workingDir"] == "/app"
    over = {"spec": {"containers": [{"name": "shard", "env": [{"name": "PATH", "value": "/mine"}]}]}}
    laid = shard(job(workers={"template": snapshot.spec.workers.template}, shards={"template": over}))["spec"]["containers"][0]
    assert [item["value"] for item in laid["env"] if item["name"] == "PATH"] == ["/mine"]


@pytest.mark.parametrize("command", [f"{HOME}/python train.py", "uv run python train.py", f"{HOME_OF_ROOT}/.local/bin/uv run train.py"])
def test_a_python_that_only_the_images_user_can_start_is_started_by_that_user(command: str) -> None:
    security = shard(of(command.split()))["spec"]["securityContext"]
    assert not {"runAsUser", "runAsGroup", "runAsNonRoot"} & security.keys()
    assert security["fsGroup"] == 65532 and security["seccompProfile"] == {"type": "RuntimeDefault"}
    named = shard(of(command.split(), {"securityContext": {"runAsUser": 1000}}))["spec"]["securityContext"]
    assert named["runAsUser"] == 1000, "who is named holds"
    container = shard(of(command.split()))["spec"]["containers"][0]["securityContext"]
    runner = "uv" in command
    assert container.pop("readOnlyRootFilesystem", False) is not runner, "a runner writes into the image"
    assert container == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_namespace_that_gives_the_user_is_not_told_one() -> None:
    """OpenShift refuses any number beyond the namespace's range, and gives one of it where none is asked for."""
    security = shard(job(), user=None)["spec"]["securityContext"]
    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "fsGroup" not in shard(of([f"{HOME}/python"]), user=None)["spec"]["securityContext"]
    assert shard(rich(), user=None)["spec"]["securityContext"]["fsGroup"] == 2000, "what the job names holds"


def test_another_user_may_be_chosen_for_all_shards() -> None:
    security = shard(job(), user=1234)["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (1234, 1234, 1234)


@pytest.mark.parametrize(("mount", "folder"), [("/data", "/app/src"), ("/app", None), ("/app/src", None), ("/app/sr", "/app/src")])
def test_a_shard_starts_where_the_worker_does_unless_that_is_a_volume_of_the_worker(mount: str, folder: str | None) -> None:
    snapshot = of(["python"], workingDir="/app/src", volumeMounts=[{"name": "v", "mountPath": mount}])
    assert shard(snapshot)["spec"]["containers"][0].get("workingDir") == folder
