"""Free ports on the loopback address, kept for the run."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from psjob_client.local.errors import BadInput
from psjob_client.local.sites import Listening
from psjob_operator.plan.observed_state import Role

ADDRESS = "127.0.0.1"


@dataclass
class Ports:
    """A data port and a status port for each shard.

    Each is held by a socket that is bound and never listens. Nobody else is given the port, not even between two attempts of a
    shard. A shard that sets SO_REUSEADDR may bind and listen on it.
    """

    data: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    _held: list[socket.socket] = field(default_factory=list)

    @property
    def shards(self) -> Sequence[Listening]:
        """The shards' addresses in index order."""
        return [Listening(ADDRESS, data, status) for data, status in zip(self.data, self.status, strict=True)]

    def command(self, role: Role, index: int, argv: Sequence[str]) -> Sequence[str]:
        """`argv`: all processes share this machine's network."""
        return argv

    def close(self) -> None:
        """Give them back."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _take(self) -> int:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._held.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((ADDRESS, 0))
        return int(held.getsockname()[1])


def reserve(shards: int) -> Ports:
    """Two ports a shard. Raises BadInput where the machine has no more."""
    ports = Ports()
    try:
        for _ in range(shards):
            ports.data.append(ports._take())
            ports.status.append(ports._take())
    except OSError as error:
        ports.close()
        raise BadInput(f"{shards} shards need {2 * shards} free ports on {ADDRESS}: {error}; set spec.ps.shards lower") from None
    return ports
