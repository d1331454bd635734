"""The operator's own key, from which it derives what it asks the status ports of all runs with: it need not read a run's Secret.

It lies in a file. In a cluster that is a Secret which the operator's pods mount. The operator that takes turns makes the Secret where
there is none, and has its key at once. The kubelets of the others show it some time later."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from psjob_operator import keys
from psjob_operator.cluster.client import SECRETS, ApiError, KubernetesClient

ENTRY = "key"
"""Of the Secret."""
LOOK_SECONDS = 2.0
"""Between two looks for the file."""
AGAIN_SECONDS = 60.0
"""Until the Secret is made anew where the file still is not there: someone may have deleted it before it was mounted."""
_log = logging.getLogger(__name__)


class KeyFileError(Exception):
    """The file cannot be used; the text names it and says what to do."""


@dataclass(frozen=True)
class KeySecret:
    """The Secret that the file is mounted from."""

    namespace: str
    name: str


class OperatorKey:
    """The key once it is there. `secret`: None: the file is made where it is missing."""

    def __init__(self, file: Path, secret: KeySecret | None) -> None:
        self._file, self._secret = file, secret
        self._value: bytes | None = None
        self.problem = f"the operator has no key of its own yet, and waits for {file}"
        """Why there is no key."""

    def questions(self, run: str) -> bytes | None:
        """The key with which this run's status ports are asked; None until the operator has its own."""
        return None if self._value is None else keys.mac(self._value, f"questions:{run}")

    def load(self) -> None:
        """Where no Secret is to be: read the file, or make it. Raises KeyFileError."""
        if self._secret is None:
            self._value = _read(self._file) or _made(self._file)

    async def obtain(self, client: KubernetesClient) -> None:
        """Of the operator that takes turns: make the Secret where there is no key, and wait for the file where it was made before."""
        told, made_at = "", float("-inf")
        clock = asyncio.get_running_loop().time
        while self._value is None:
            try:
                self._value = _read(self._file)
                if self._value is None and self._secret is not None and clock() >= made_at + AGAIN_SECONDS:
                    self._value = await self._make(client, self._secret)
                    made_at = clock()
            except (KeyFileError, ApiError) as error:
                self.problem = f"the operator has no key of its own: {error}"
            if self._value is not None:
                return
            if self.problem != told:
                told = self.problem
                _log.warning("%s; no run begins until it has one", told)
            await asyncio.sleep(LOOK_SECONDS)

    async def _make(self, client: KubernetesClient, secret: KeySecret) -> bytes | None:
        """The key that was stored as the Secret; None where there is one already. Raises ApiError."""
        value = secrets.token_bytes(keys.SIZE)
        body = {
            "apiVersion": "v1",
            "kind": SECRETS.kind,
            "metadata": {
                "name": secret.name,
                "labels": {"app.kubernetes.io/name": "psjob", "app.kubernetes.io/managed-by": "psjob-operator"},
            },
            "type": "Opaque",
            "immutable": True,
            "data": {ENTRY: base64.b64encode(value.hex().encode()).decode()},
        }
        try:
            await client.create(SECRETS, secret.namespace, body)
        except ApiError as error:
            if not error.taken:
                raise
            self.problem = (
                f"the operator has no key of its own yet: the Secret {secret.namespace}/{secret.name} is there, and the kubelet"
                f" has not shown it as {self._file}"
            )
            return None
        _log.info("%s", f"the Secret {secret.namespace}/{secret.name} was made: the operator's key")
        return value


def default_file() -> Path:
    """Where the key lies outside a cluster when no file is named: among the user's state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "psjob-operator" / "key"


def _read(file: Path) -> bytes | None:
    """The key in that file; None where there is none."""
    try:
        text = file.read_text("ascii").strip()
        value = bytes.fromhex(text) if len(text) == 2 * keys.SIZE else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyFileError(f"--key-file {file} cannot be read: {error.strerror}; give it the operator's user") from error
    except ValueError:
        value = b""
    if len(value) != keys.SIZE:
        raise KeyFileError(f"--key-file {file} does not hold {2 * keys.SIZE} hex digits; remove it, and a new key is made")
    return value


def _made(file: Path) -> bytes:
    """A new key in that file, or the one of who was quicker. The name appears with its content, so that nobody reads half of it."""
    value = secrets.token_bytes(keys.SIZE)
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{value.hex()}\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(part, file)
        except FileExistsError:
            return _read(file) or _made(file)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
        _sync(file.parent)
    except OSError as error:
        raise KeyFileError(f"--key-file {file} cannot be made: {error.strerror}; name a file in a folder of the operator's user") from error
    _log.info("%s", f"{file} was made: the operator's key")
    return value


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
