"""Certificates of a throw-away cluster, by the openssl command, and kubeconfigs that carry them."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.paths import ClusterError, Unavailable

DAYS = "3650"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """The folder of one cluster's CA; every method writes into it and returns what it wrote."""

    folder: Path

    @property
    def ca(self) -> Pair:
        return Pair(self.folder / "ca.crt", self.folder / "ca.key")

    def create(self) -> None:
        """Make the CA and the key that signs service account tokens. Raises ClusterError without openssl."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _openssl("req", "-x509", *_new_key(self.ca.key), "-days", DAYS, "-subj", "/CN=psjob-cluster-ca", "-out", str(self.ca.cert))
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(self.folder / "sa.key"))

    def client(self, name: str, user: str, groups: tuple[str, ...] = ()) -> Pair:
        """A client certificate that the API server reads as `user` in `groups`; files are `name`.crt and `name`.key."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        return self._issue(name, subject, "extendedKeyUsage=clientAuth\n")

    def server(self, name: str, user: str, addresses: tuple[str, ...]) -> Pair:
        """A serving certificate for those IP addresses and DNS names; also good as a client's, for etcd."""
        names = ",".join(("IP:" if address.replace(".", "").isdigit() else "DNS:") + address for address in addresses)
        return self._issue(name, f"/CN={user}", f"extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={names}\n")

    def _issue(self, name: str, subject: str, extensions: str) -> Pair:
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        request, words = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        words.write_text("basicConstraints=CA:FALSE\nkeyUsage=digitalSignature\n" + extensions)
        _openssl("req", *_new_key(pair.key), "-subj", subject, "-out", str(request))
        ca = ("-CA", str(self.ca.cert), "-CAkey", str(self.ca.key), "-set_serial", str(secrets.randbits(63)))
        _openssl("x509", "-req", "-in", str(request), *ca, "-days", DAYS, "-extfile", str(words), "-out", str(pair.cert))
        request.unlink()
        words.unlink()
        return pair


def kubeconfig(path: Path, url: str, ca: Path, pair: Pair, namespace: str = "default") -> Path:
    """Write a kubeconfig with the certificates inside it, so that the file alone is enough; JSON is YAML."""
    cluster = {"server": url, "certificate-authority-data": _inline(ca)}
    user = {"client-certificate-data": _inline(pair.cert), "client-key-data": _inline(pair.key)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "psjob", "cluster": cluster}],
        "users": [{"name": "psjob", "user": user}],
        "contexts": [{"name": "psjob", "context": {"cluster": "psjob", "user": "psjob", "namespace": namespace}}],
        "current-context": "psjob",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _inline(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _new_key(path: Path) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path))


def _openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        raise Unavailable("the openssl command makes the cluster's certificates and is not on PATH; install openssl and run this again")
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-500:]}")
