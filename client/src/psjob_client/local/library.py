"""The library `psjob`, which trains: another distribution than the client."""

from __future__ import annotations

from importlib.util import find_spec

from psjob_client.local.errors import BadInput
from psjob_operator.contract import INSTALL


def must_be_installed(command: str) -> None:
    """Raises BadInput where `command` finds no library in this environment."""
    if find_spec("psjob") is None:
        raise BadInput(f"{command} needs psjob's library beside it; install it into the same environment, {INSTALL}")
