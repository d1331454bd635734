"""Velero itself, and what it needs of a cloud made of folders, so that tests make real backups and restore them."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hack.cluster.api import Api
from hack.cluster.build import find_go
from hack.cluster.paths import ClusterError
from hack.cluster.proc import tail, wait_for
from hack.gotool import GoTool

MODULE = Path(__file__).resolve().parent / "module"
SERVER = GoTool(
    "velero", "github.com/vmware-tanzu/velero/cmd/velero", MODULE, "which backs objects and volumes up, once (a quarter of an hour)"
)
PLUGIN = GoTool("velero-folder", ".", MODULE, "the plug-in that keeps Velero's backups in a folder, once (seconds, after Velero itself)")
NAMESPACE = "velero"
LIMIT = 120.0


class Velero:
    """A server beside a running cluster, and its command."""

    def __init__(self, api: Api, kubeconfig: Path, folder: Path) -> None:
        self._api, self._kubeconfig, self._folder = api, kubeconfig, folder
        self._program = SERVER.built(find_go)
        self._log = folder / "velero.log"

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """The server, with a place for backups and one for snapshots; its namespace and CRDs are removed at the end."""
        plugins = self._folder / "plugins"
        plugins.mkdir(parents=True)
        shutil.copy(PLUGIN.built(find_go), plugins)
        (self._folder / "store" / "backups").mkdir(parents=True)
        crds = json.loads(self.run("install", "--crds-only", "--dry-run", "-o", "json"))["items"]
        for crd in crds:
            self._api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        wait_for("Velero's CRDs", lambda: self._api.ok(f"{self._path('backups')}"), LIMIT)
        self._api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        self._places()
        words = ["server", "--plugin-dir", str(plugins), "--metrics-address", "127.0.0.1:0", "--log-level", "info"]
        with self._log.open("ab") as log:
            server = subprocess.Popen(self._words(*words), stdout=log, stderr=log, cwd=self._folder)
        try:
            wait_for("Velero to take its place for backups", lambda: self._available(server), LIMIT)
            yield
        finally:
            server.kill()
            server.wait()
            self._remove(crds)

    def run(self, *words: str, seconds: float = LIMIT) -> str:
        """Velero's command; what it says. Raises ClusterError if it fails."""
        done = subprocess.run(self._words(*words), capture_output=True, text=True, timeout=seconds)
        if done.returncode != 0:
            raise ClusterError(f"velero {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def phase(self, plural: str, name: str) -> str:
        """Of a backup or a restore, such as Completed."""
        return str((self._api.get(f"{self._path(plural)}/{name}").get("status") or {}).get("phase"))

    def words(self, plural: str, name: str) -> str:
        """What it says of errors and warnings of a backup or restore, and its server's last lines."""
        file = self._folder / "store" / "backups" / plural / name / f"{'restore-' * (plural == 'restores')}{name}-results.gz"
        return (gzip.decompress(file.read_bytes()).decode() if file.exists() else "") + self.log()

    def log(self) -> str:
        """The end of the server's log."""
        return tail(self._log, 40)

    def _words(self, *words: str) -> list[str]:
        return [str(self._program), *words, "--kubeconfig", str(self._kubeconfig), "--namespace", NAMESPACE]

    def _places(self) -> None:
        store: dict[str, Any] = {"provider": "psjob.dev/folder", "config": {"root": str(self._folder / "store")}, "default": True}
        store["objectStorage"] = {"bucket": "backups"}
        snapshots = {"provider": "psjob.dev/folder", "config": {"root": str(self._folder / "snapshots")}}
        for kind, spec in (("BackupStorageLocation", store), ("VolumeSnapshotLocation", snapshots)):
            body = {"apiVersion": "velero.io/v1", "kind": kind, "metadata": {"name": "default", "namespace": NAMESPACE}, "spec": spec}
            self._api.create(self._path(f"{kind.lower()}s"), body)
        # A restore asks its own Deployment for the image of its helper, which no pod here needs.
        pod = {"metadata": {"labels": {"app": "velero"}}, "spec": {"containers": [{"name": "velero", "image": "velero/velero:v1.18.3"}]}}
        spec = {"replicas": 0, "selector": {"matchLabels": {"app": "velero"}}, "template": pod}
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "velero", "namespace": NAMESPACE}, "spec": spec}
        self._api.create(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments", body)

    def _remove(self, crds: list[dict[str, Any]]) -> None:
        """Wait until nothing of it is left: who is next may want one too."""
        for restore in self._api.get(self._path("restores"))["items"]:
            self._api.merge(f"{self._path('restores')}/{restore['metadata']['name']}", {"metadata": {"finalizers": None}})
        paths = [f"/api/v1/namespaces/{NAMESPACE}"]
        paths += [f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}" for crd in crds]
        for path in paths:
            self._api.delete(path)
            wait_for(f"{path} to be gone", lambda path=path: not self._api.ok(path), LIMIT)  # type: ignore[misc]

    def _available(self, server: subprocess.Popen[bytes]) -> bool:
        if server.poll() is not None:
            raise ClusterError(f"velero server ended with {server.returncode}: {self.log()}")
        return self.phase("backupstoragelocations", "default") == "Available"

    def _path(self, plural: str) -> str:
        return f"/apis/velero.io/v1/namespaces/{NAMESPACE}/{plural}"
