"""`psjob plan-topology --probe` on this machine's own loopback."""

from __future__ import annotations

import asyncio
import json

import pytest

from psjob_client.cli.main import cli
from psjob_client.local import measure
from psjob_client.problems import BadInput
from tests.typed import CliRunner


def said(*words: str) -> str:
    told = CliRunner().invoke(cli, ["plan-topology", *words], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return told.output


def test_the_probe_measures_every_pair_of_real_processes() -> None:
    told: list[str] = []
    raw = measure.measure(3, told.append)
    assert [link["between"] for link in raw["links"]] == [["p0", "p1"], ["p0", "p2"], ["p1", "p2"]]
    assert all(link["bandwidth"] > 1e6 and 0 < link["latency"] < 1 for link in raw["links"]) and raw["total"] > 1e6
    assert told[0] == "starting 3 processes" and "p0 to p2 (2 of 3)" in told and told[-1] == "all at once"


def test_a_probed_machine_is_planned() -> None:
    (plan,) = json.loads(said("--probe", "2", "-o", "json"))
    assert plan["machine"]["name"] == "2-processes-here" and plan["machine"]["total"] > 0
    assert {"ring", "ps", "tree"} <= {given["strategy"] for given in plan["strategies"]}


def test_a_probe_that_gets_no_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ANSWER_SECONDS", 0.001)
    with pytest.raises(BadInput, match=r"--probe 2: no answer in time \(0 s a step\); try fewer processes"):
        measure.measure(2, lambda _: None)


def test_a_process_that_ends_is_named() -> None:
    async def die() -> None:
        async with measure._Peer("p7") as peer:
            await peer.ask(do="send", port=1, seconds=0.1)

    with pytest.raises(OSError, match=r"process p7: .*refused"):
        asyncio.run(die())
