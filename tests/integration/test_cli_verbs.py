"""The verbs over jobs on the real API server: what each answers, in which form, and every refusal as one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from psjob import Client
from psjob_client.problems import Conflict, DeadlinePassed
from tests.integration.api_client import Api
from tests.integration.command import psjob as command
from tests.support.cluster_fixtures import Cluster
from tests.unit.api_manifest import GOOD

pytestmark = pytest.mark.cluster


@pytest.fixture
def namespace(bare_namespace: str) -> str:
    return bare_namespace


def psjob(cluster: Cluster | None, *words: str, kubeconfig: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return command(*words, kubeconfig=kubeconfig or (cluster and cluster.kubeconfig), stdin=stdin)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a verb that could not do it."""
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("psjob: ")
    return line


def test_suspend_and_resume_set_one_field(control_plane: Cluster, job_api: Api, namespace: str) -> None:
    job_api.create(namespace, GOOD)
    for verb, value in (("suspend", True), ("resume", False)):
        done = psjob(control_plane, verb, "digits", "-n", namespace)
        assert done.returncode == 0 and "digits patched" in done.stdout, done.stderr
        assert job_api.get(namespace, "digits")["spec"]["suspend"] is value


GOING = "claim digits-checkpoints is being deleted: it goes with all checkpoints when no pod uses it"


@pytest.fixture
def costly(job_api: Api, namespace: str) -> str:
    """The namespace of a running job whose suspension costs its checkpoints."""
    job_api.create(namespace, GOOD)
    said = {"type": "CheckpointReady", "status": "False", "reason": "ClaimTerminating", "message": GOING}
    said |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    code, answer = job_api.merge(namespace, "digits", {"status": {"phase": "Running", "conditions": [said]}}, status=True)
    assert code == 200, answer
    return namespace


def test_suspend_asks_before_it_costs_the_checkpoints(control_plane: Cluster, job_api: Api, costly: str) -> None:
    done = psjob(control_plane, "suspend", "digits", "-n", costly)
    assert done.returncode != 0 and GOING in done.stderr and "add --yes" in done.stderr
    assert "suspend" not in job_api.get(costly, "digits")["spec"]
    done = psjob(control_plane, "suspend", "digits", "-n", costly, "--yes")
    assert done.returncode == 0 and GOING in done.stderr
    assert job_api.get(costly, "digits")["spec"]["suspend"] is True


def test_a_client_does_not_suspend_before_it_is_told_to_lose_the_checkpoints(control_plane: Cluster, job_api: Api, costly: str) -> None:
    with Client.kube(namespace=costly, kubeconfig=control_plane.kubeconfig) as client:
        for suspend in (client.suspend, lambda name: client.job(name).suspend()):
            with pytest.raises(Conflict, match="lose_checkpoints=True") as refusal:
                suspend("digits")
            assert GOING in str(refusal.value) and "psjob suspend digits --yes" in refusal.value.in_terminal
            assert "suspend" not in job_api.get(costly, "digits")["spec"]
        with pytest.raises(DeadlinePassed):  # no operator is there to carry it out
            client.suspend("digits", timeout=0.1, lose_checkpoints=True)
    assert job_api.get(costly, "digits")["spec"]["suspend"] is True


@pytest.mark.serial
def test_a_job_is_submitted_listed_shown_and_deleted(control_plane: Cluster, job_api: Api, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    done = psjob(control_plane, "submit", str(file), "-n", namespace, "--set", "spec.workers.replicas=3")
    next_command = f"psjob logs digits -f -n {namespace}"
    assert done.returncode == 0 and done.stdout == f"pstrainingjob.psjob.dev/digits created; `{next_command}` follows it\n", done.stderr
    assert job_api.get(namespace, "digits")["spec"]["workers"]["replicas"] == 3
    assert "already" in refused(psjob(control_plane, "submit", str(file), "-n", namespace))
    assert psjob(control_plane, "list", "-n", namespace, "-o", "name").stdout == "pstrainingjob.psjob.dev/digits\n"
    lines = psjob(control_plane, "list", "-n", namespace).stdout.splitlines()
    assert lines[0].split()[:3] == ["NAME", "PHASE", "MODE"] and lines[1].split()[:3] == ["digits", "Pending", "sync"]
    assert "WHERE" in psjob(control_plane, "list", "-n", namespace, "-o", "wide").stdout
    assert f"/{namespace}" in psjob(control_plane, "list", "-A", "-o", "wide").stdout
    got = json.loads(psjob(control_plane, "get", "pstrainingjob.psjob.dev/digits", "-n", namespace, "-o", "json").stdout)
    assert got["phase"] == "Pending" and got["where"] == "cluster" and got["manifest"]["spec"]["workers"]["replicas"] == 3
    assert set(got["manifest"]["metadata"]) == {"name", "namespace"}, "what the API server adds is left out"
    assert yaml.safe_load(psjob(control_plane, "get", "digits", "-n", namespace, "-o", "yaml").stdout)["name"] == "digits"
    text = psjob(control_plane, "get", "digits", "-n", namespace).stdout
    assert "phase:       Pending" in text and "no psjob operator has seen this job yet" in text
    assert psjob(control_plane, "top", "-n", namespace).stdout.splitlines()[1].startswith("digits")
    done = psjob(control_plane, "delete", "digits", "-n", namespace)
    assert done.returncode == 0 and done.stdout == "pstrainingjob.psjob.dev/digits deleted\n", done.stderr
    assert "there is no job in that namespace" in psjob(control_plane, "list", "-n", namespace).stderr


def test_the_command_as_a_process_of_its_own(control_plane: Cluster, job_api: Api, namespace: str) -> None:
    """The other tests call it in this process."""
    job_api.create(namespace, GOOD)
    words = [sys.executable, "-m", "psjob_client.cli.main", "suspend", "digits", "-n", namespace]
    env = {**os.environ, "KUBECONFIG": str(control_plane.kubeconfig)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "digits patched" in done.stdout, done.stderr


def test_a_manifest_names_its_namespace(control_plane: Cluster, job_api: Api, namespace: str, tmp_path: Path) -> None:
    body = {**GOOD, "metadata": {"name": "digits", "namespace": namespace}}
    done = psjob(control_plane, "submit", "-", "-o", "name", stdin=json.dumps(body))
    assert done.returncode == 0 and done.stdout == "pstrainingjob.psjob.dev/digits\n", done.stderr
    assert job_api.get(namespace, "digits")["metadata"]["name"] == "digits"
    assert f"metadata.namespace is {namespace}" in refused(psjob(control_plane, "submit", "-", "-n", "default", stdin=json.dumps(body)))


def test_a_script_is_submitted_with_its_arguments(control_plane: Cluster, job_api: Api, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import sys\n\nprint(sys.argv[1:], '$(HOME)')\n")
    words = ("submit", str(file), "--workers", "3", "--mode", "async", "--image", "me/torch:1", "-n", namespace, "-o", "name")
    done = psjob(control_plane, *words, "--", "--lr", "0.1", "--", "--image")
    assert done.returncode == 0, done.stderr
    spec = job_api.get(namespace, done.stdout.strip().rpartition("/")[2])["spec"]
    (container,) = spec["workers"]["template"]["spec"]["containers"]
    assert (spec["workers"]["replicas"], spec["training"]["mode"], container["image"]) == (3, "async", "me/torch:1")
    words = [word.replace("$$", "$") for word in (*container["command"], *container["args"])]
    printed = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=30, check=True).stdout
    assert printed == "['--lr', '0.1', '--', '--image'] $(HOME)\n"


@pytest.mark.parametrize(
    "verb", ["get", "logs", "events", "metrics", "checkpoints", "wait", "suspend", "resume", "checkpoint", "delete", "top"]
)
def test_a_job_that_is_not_there_is_said_with_near_names(control_plane: Cluster, job_api: Api, namespace: str, verb: str) -> None:
    job_api.create(namespace, GOOD)
    line = refused(psjob(control_plane, verb, "digit", "-n", namespace))
    assert f'there is no job "digit" in namespace {namespace}' in line and "did you mean digits?" in line


def test_waits_end(control_plane: Cluster, job_api: Api, namespace: str) -> None:
    job_api.create(namespace, GOOD)
    for words in (("wait", "--timeout", "1s"), ("suspend", "--wait", "--timeout", "1s"), ("checkpoint", "--timeout", "1s")):
        line = refused(psjob(control_plane, words[0], "digits", "-n", namespace, *words[1:]))
        assert "after 1 s" in line


def test_who_has_no_rights_is_told_so(control_plane: Cluster, namespace: str, tmp_path: Path) -> None:
    stranger = control_plane.user_kubeconfig("stranger", folder=tmp_path)
    for words in (("list",), ("get", "digits"), ("submit", "-")):
        line = refused(psjob(None, *words, "-n", namespace, kubeconfig=stranger, stdin=json.dumps(GOOD)))
        assert 'User "stranger" cannot' in line and "kubectl auth can-i" in line


def test_no_cluster_no_context_no_kubeconfig(control_plane: Cluster, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    dead.write_text(control_plane.kubeconfig.read_text().replace(control_plane.url, "https://127.0.0.1:1"))
    assert "gives no answer" in refused(psjob(None, "list", "-n", "default", kubeconfig=dead))
    assert "no-such" in refused(psjob(control_plane, "list", "--context", "no-such"))
    assert "there is no file" in refused(psjob(None, "get", "digits", "-n", "x", kubeconfig=tmp_path / "none"))
    assert "use one of the two" in refused(psjob(control_plane, "list", "--local", "-n", "x"))


def test_finished_jobs_are_cleaned(control_plane: Cluster, job_api: Api, namespace: str) -> None:
    for name in ("old", "fresh"):
        job_api.create(namespace, {**GOOD, "metadata": {"name": name}})
    said = {"type": "Complete", "status": "True", "reason": "Completed", "message": "", "observedGeneration": 1}
    said |= {"lastTransitionTime": "2020-01-01T00:00:00Z"}
    over = {"phase": "Complete", "completionTime": "2020-01-01T00:00:00Z", "conditions": [said]}
    job_api.merge(namespace, "old", {"status": over}, status=True)
    shown = psjob(control_plane, "clean", "-n", namespace, "--dry-run")
    assert shown.stdout.startswith("old  Complete") and len(shown.stdout.splitlines()) == 1, shown.stderr
    assert "add --yes" in psjob(control_plane, "clean", "-n", namespace).stderr
    done = psjob(control_plane, "clean", "-n", namespace, "--yes")
    assert done.returncode == 0 and "removed 1" in done.stderr
    assert psjob(control_plane, "list", "-n", namespace, "-o", "name").stdout == "pstrainingjob.psjob.dev/fresh\n"
