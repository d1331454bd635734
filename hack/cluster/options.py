"""What a person asked `up` for, and where the cluster's files lie in its state folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster.api import Api
from hack.cluster.pki import Pair

POD_RANGE, SERVICE_RANGE, DNS_SERVICE = "10.244.0.0/16", "10.96.0.0/16", "10.96.0.10"
BRIDGE, BRIDGE_RANGE, BRIDGE_ADDRESS = "psjob0", "10.243.0.0/24", "10.243.0.1"


@dataclass(frozen=True)
class Options:
    """One cluster. `mounts` are (source, target) folders that every container of a real node sees, read-only.

    `audit_users` are those whose requests the audit log holds; none: everybody's. `qps` is what controller-manager and scheduler may ask.
    `wait` is how long, in seconds, another cluster with real nodes may take to leave; `owner` a process that this cluster ends with.
    """

    state: Path
    nodes: int = 0
    kwok: int = 0
    mounts: tuple[tuple[str, str], ...] = ()
    port: int | None = None
    audit: bool = False
    audit_users: tuple[str, ...] = ()
    qps: int = 300
    isolate: bool = False
    grace: float | None = None
    wait: float = 0.0
    owner: int | None = None
    owner_started: str | None = None

    @property
    def address(self) -> str:
        """Where the API server listens: loopback, or the bridge that the nodes reach it on."""
        return BRIDGE_ADDRESS if self.nodes else "127.0.0.1"

    def node_address(self, index: int) -> str:
        return f"10.243.0.{10 + index}"

    def pod_range(self, index: int) -> str:
        return f"10.244.{index}.0/24"

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "state": str(self.state)})

    @staticmethod
    def from_json(text: str) -> Options:
        fields = json.loads(text)
        fields["state"] = Path(fields["state"])
        fields["audit_users"] = tuple(fields["audit_users"])
        fields["mounts"] = tuple((source, target) for source, target in fields["mounts"])
        return Options(**fields)


@dataclass(frozen=True)
class Ready:
    """What a running cluster tells those who use it; `cluster.json` in its state folder."""

    state: str
    holder: int
    url: str
    kubeconfig: str
    kubectl: str
    ca: str
    cert: str
    key: str
    nodes: int
    audit: str | None
    seconds: float

    @staticmethod
    def load(state: Path) -> Ready | None:
        """The running cluster's facts, or None while (or when) there is none."""
        try:
            fields: dict[str, Any] = json.loads((state / "cluster.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return Ready(**fields)

    def api(self) -> Api:
        """The API server, as its administrator."""
        return Api(self.url, Path(self.ca), Pair(Path(self.cert), Path(self.key)))

    def save(self) -> None:
        file = Path(self.state) / "cluster.json"
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        scratch.rename(file)
