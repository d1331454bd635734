"""kubectl and helm from tests, waiting with a deadline, and the processes behind pods."""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from hack.cluster.api import Api, ApiError
from psjob.process.status_client import ask_shard
from tests.support.cluster_fixtures import OPERATOR_IMAGE, RUNTIME_IMAGE, Cluster

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "psjob"
_PATH = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
RESTRICTED_LEVEL = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Labels of a namespace."""
KINDS = {
    "pod": ("v1", "pods", True),
    "pods": ("v1", "pods", True),
    "pvc": ("v1", "persistentvolumeclaims", True),
    "serviceaccount": ("v1", "serviceaccounts", True),
    "node": ("v1", "nodes", False),
    "pv": ("v1", "persistentvolumes", False),
    "lease": ("coordination.k8s.io/v1", "leases", True),
    "networkpolicy": ("networking.k8s.io/v1", "networkpolicies", True),
    "pstrainingjob": ("psjob.dev/v1alpha1", "pstrainingjobs", True),
}
"""Group and version, plural, and whether it is namespaced. They are read in this process: a kubectl for each poll costs a tenth of a second
of CPU."""
OPEN = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "open"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]},
}
"""What policies let in adds up: beside this one those of runs keep nobody out."""
Answer = subprocess.CompletedProcess[str]
T = TypeVar("T")


def tool(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    assert found, f"{name} is neither in .venv/bin nor on PATH; `make install` brings it"
    return found


def wait_for(what: str, ask: Callable[[], T | None], seconds: float, every: float = 0.25, story: Callable[[], str] | None = None) -> T:
    """Ask until the answer is neither None nor False. After `seconds` the test fails with `what` and the story."""
    end = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer is not None and answer is not False:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}" + (f"\n{story()}" if story else ""))
        time.sleep(every)


@dataclass(frozen=True)
class Kube:
    """One cluster, seen from one namespace."""

    kubeconfig: str
    namespace: str
    api: Api | None = None
    """Reads what is in KINDS; without it kubectl does."""

    def run(
        self, program: str, *args: str, stdin: str | None = None, check: bool = True, timeout: float = 120, namespace: str = ""
    ) -> Answer:
        """kubectl or helm in our namespace, or in that one."""
        words = [tool(program), "--kubeconfig", self.kubeconfig, "-n", namespace or self.namespace, *args]
        answer = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout)
        assert not check or answer.returncode == 0, f"{program} {' '.join(args)}: {answer.stdout}{answer.stderr}"
        return answer

    def kubectl(self, *args: str, **more: Any) -> str:
        return self.run("kubectl", *args, **more).stdout

    def helm(self, *args: str, **more: Any) -> str:
        return self.run("helm", *args, **more).stdout

    def apply(self, *documents: dict[str, Any], **more: Any) -> str:
        return self.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(document) for document in documents), **more)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """One object, or None where it is not."""
        if self.api is None or kind not in KINDS:
            text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
            return json.loads(text) if text.strip() else None
        try:
            found: dict[str, Any] = self.api.get(f"{self._path(kind)}/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def list(self, kind: str, labels: str = "") -> list[dict[str, Any]]:
        """All of a kind."""
        if self.api is None or kind not in KINDS:
            words = ["get", kind, "-o", "json", *(["-l", labels] if labels else [])]
            found = json.loads(self.kubectl(*words))
        else:
            found = self.api.get(self._path(kind) + (f"?labelSelector={quote(labels)}" if labels else ""))
        items: list[dict[str, Any]] = found["items"]
        return items

    def _path(self, kind: str) -> str:
        group, plural, namespaced = KINDS[kind]
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        return f"{root}/namespaces/{self.namespace}/{plural}" if namespaced else f"{root}/{plural}"

    def names(self, kind: str, labels: str = "") -> set[str]:
        return {item["metadata"]["name"] for item in self.list(kind, labels)}

    def status(self, job: str) -> dict[str, Any]:
        found = self.get("pstrainingjob", job)
        return (found or {}).get("status") or {}

    def story(self, job: str) -> str:
        """What a person would look at: the job, its pods, events and the ends of logs."""
        parts = [
            self.kubectl("get", "pstrainingjob", job, "-o", "jsonpath={.status}", check=False),
            self.kubectl("get", "pods", "-o", "wide", check=False),
            self.kubectl("get", "events", "--sort-by=.metadata.creationTimestamp", check=False)[-4000:],
        ]
        for pod in sorted(self.names("pods")):
            parts.append(f"-- {pod}: {self.kubectl('logs', pod, '--all-containers', '--tail=15', check=False)}")
        return "\n".join(parts)


def _image(value: str, reference: str) -> list[str]:
    repository, _, tag = reference.rpartition(":")
    return ["--set-string", f"{value}.repository={repository}", "--set-string", f"{value}.tag={tag}"]


def install(home: Kube, *options: str, chart: Path = CHART, operator: str = OPERATOR_IMAGE, runtime: str = RUNTIME_IMAGE) -> None:
    """helm upgrade --install of a chart with its images, those of this checkout if not told, and wait until the operator is ready."""
    settings = [*_image("image", operator), *_image("runtimeImage", runtime)]
    home.helm("upgrade", "--install", "psjob", str(chart), *settings, *options)
    home.kubectl("rollout", "status", "deployment/psjob", "--timeout=120s", timeout=150)


def restricted_namespace(kube: Kube) -> None:
    """Make our namespace, under the restricted Pod Security level, and wait until pods may be made in it."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kube.namespace, "labels": RESTRICTED_LEVEL}}
    kube.apply(body)
    wait_for("the default ServiceAccount", lambda: kube.get("serviceaccount", "default"), 30)


def own_namespace(home: Kube, cluster: Cluster, prefix: str) -> Kube:
    """A restricted namespace with a new name; the caller deletes it."""
    return replace(home, namespace=cluster.create_namespace(prefix, RESTRICTED_LEVEL, isolated=False))


def phase(kube: Kube, job: str, *wanted: str) -> Callable[[], str | None]:
    def ask() -> str | None:
        seen = kube.status(job).get("phase", "")
        return seen if seen in wanted else None

    return ask


def condition(status: dict[str, Any], kind: str) -> dict[str, Any] | None:
    return next((found for found in status.get("conditions", []) if found["type"] == kind), None)


# -- processes behind pods ----------------------------------------------------------------------------------------------------


def processes(pod: dict[str, Any], word: str) -> list[int]:
    """Process ids (as seen on this machine) of the pod's processes whose command line holds `word`."""
    uid = pod["metadata"]["uid"]
    found = []
    for folder in _folders():
        try:
            if uid in (folder / "cgroup").read_text() and word in (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode():
                found.append(int(folder.name))
        except OSError:  # ended meanwhile
            continue
    return found


def _folders() -> Iterator[Path]:
    return (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())


def kill(pod: dict[str, Any], word: str) -> float:
    """SIGKILL to those processes; answers the unix time of it. The test fails where there is none."""
    victims = processes(pod, word)
    assert victims, f"pod {pod['metadata']['name']} has no process with {word!r} in its command line"
    at = time.time()
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    return at


def shard_status(kube: Kube, pod: dict[str, Any], port: int = 7071) -> dict[str, Any] | None:
    """What the shard's status port says to who has the run's key, or None where it does not answer."""
    address = pod.get("status", {}).get("podIP")
    mounted = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if volume["name"] == "psjob-secret"]
    if not address or not mounted:
        return None
    try:
        return ask_shard(address, port, _questions(kube, mounted[0]))
    except (OSError, ValueError):
        return None


@functools.cache
def _questions(kube: Kube, secret: str) -> bytes:
    """Read once: the API server may be away later."""
    data = json.loads(kube.kubectl("get", "secret", secret, "-o", "json"))["data"]
    return bytes.fromhex(base64.b64decode(data["questions"]).decode())
