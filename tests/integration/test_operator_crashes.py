"""The operator is ended after each of its writes in turn, once with the reply and once with the reply lost, over a job's whole life.

Each time another operator goes on, and the end is the same: no pod, Service, ConfigMap or claim more or less, no Event told twice.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import pytest

from tests.integration.crashing import SPEC, Life
from tests.integration.operator_harness import Operator, World, manifest
from tests.integration.operator_proxy import Proxy, Strike
from tests.soaking import rotating

pytestmark = pytest.mark.cluster
PARTS = 6
FIRST = ("reply lost", 0)
ROWS = [FIRST, *(rotating(*row) for row in itertools.product(("replied", "reply lost"), range(PARTS)) if row != FIRST)]


def live(place: World, proxy: Proxy, operator: Operator, node: str, name: str, strike: Strike | None) -> tuple[dict[str, Any], int]:
    """One life; answers its summary and the number of writes carried out."""
    life = Life(place, node, name)
    before = len(proxy.writes)
    proxy.arm(strike, operator.kill)
    place.create(manifest(name, **SPEC))
    deadline = time.monotonic() + 120
    while not life.step():
        if strike is not None and proxy.struck and not operator.alive():
            proxy.arm(None, operator.kill)
            operator.start(ready=False)
            strike = None
        assert time.monotonic() < deadline, place.story()
        time.sleep(0.02)
    if proxy.struck:  # at a write after which nothing was left to do: the next life needs an operator all the same
        place.until("the operator to be ended", lambda: not operator.alive())
        proxy.arm(None, operator.kill)
        operator.start(ready=False)
    return life.summary(), len(proxy.writes) - before


def told(place: World, name: str) -> Counter[str]:
    """How often each news was told; a start again is another news each time."""
    mine = [event for event in place.events() if event["involvedObject"]["name"] == name]
    return Counter(event["reason"] if event["reason"] != "Restarted" else event["message"] for event in mine)


@pytest.mark.parametrize(("reply", "part"), ROWS)
def test_ended_after_each_write(place: World, proxy: Proxy, reply: str, part: int) -> None:
    lost = reply == "reply lost"
    node = place.node(f"{place.namespace}-n")
    operator = place.operator("--qps=1000", "--burst=1000", url=proxy.url)
    clean, writes = live(place, proxy, operator, node, "clean", None)
    assert clean["phase"] == "Complete" and writes > 12, proxy.writes
    assert clean["pods made"] == {"-ps-0": 2, "-worker-0": 1, "-worker-1": 1}
    place.until("the last Event", lambda: told(place, "clean")["Completed"])
    news = told(place, "clean")
    assert {"Running": 1, "Completed": 1}.items() <= news.items(), news
    for at in range(1 + part, writes + 1, PARTS):
        name = f"w{at}"
        found, _ = live(place, proxy, operator, node, name, Strike(at, lost))
        assert found == clean, f"write {at} ({proxy.writes[-40:]}): {found}\n{place.story()}"
        assert all(times <= news.get(what, 1) for what, times in told(place, name).items()), told(place, name)
