"""`psjob-operator check` where no API server listens."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import yaml

from psjob_operator.cluster.health import CheckFailed, CheckOptions, check_installation


def test_a_server_that_is_not_there_is_no_matter_of_rights(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        server = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        }  # fmt: skip
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        with pytest.raises(CheckFailed) as told:
            asyncio.run(check_installation(CheckOptions(str(tmp_path / "config"), (), None, 1.0)))
    assert "cannot be asked" in str(told.value) and "rbac" not in str(told.value)
