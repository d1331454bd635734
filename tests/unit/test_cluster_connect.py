"""A way to the API server that cannot be used is told in a sentence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from psjob_operator.cluster.client import ConnectError, load_configuration

BROKEN = {
    "empty": "",
    "not yaml": "not: [yaml",
    "a list": "- 1\n",
    "no context": "apiVersion: v1\nkind: Config\n",
    "context without cluster": (
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: none, user: none}}]\n"
    ),
    "certificate without file": (
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1', certificate-authority: /nowhere/ca.crt}}]\n"
        "users: [{name: u, user: {}}]\n"
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_no_kubeconfig(tmp_path: Path, what: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(BROKEN[what])
    with pytest.raises(ConnectError) as told:
        asyncio.run(load_configuration(str(file)))
    assert str(file) in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="there is no file"):
        asyncio.run(load_configuration(str(tmp_path / "none")))
