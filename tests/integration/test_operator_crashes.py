"""The operator is ended after each of its writes in turn, once with the reply and once with the reply lost, over a job's whole life.

Each time another operator continues, and the end is the same: no pod, Service, ConfigMap or claim more or less, no Event told twice.

- An operator that lives while all between it and the API server goes wrong: replies lost, refusals, delays, watches that double, hold
  back, lose and end. At the end every job is what it would have been, and no seat was ever held twice.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.operator_harness import Operator, World, manifest
from tests.integration.operator_proxy import Proxy, Strike, Weather
from tests.integration.own_place import place
from tests.support.soaking import rotating, soak

__all__ = ["place"]

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
    assert clean["pods made"] == {"-shard-0": 2, "-worker-0": 1, "-worker-1": 1}
    place.until("the last Event", lambda: told(place, "clean")["Completed"])
    news = told(place, "clean")
    assert {"Running": 1, "Completed": 1}.items() <= news.items(), news
    for at in range(1 + part, writes + 1, PARTS):
        name = f"w{at}"
        found, _ = live(place, proxy, operator, node, name, Strike(at, lost))
        assert found == clean, f"write {at} ({proxy.writes[-40:]}): {found}\n{place.story()}"
        assert all(times <= news.get(what, 1) for what, times in told(place, name).items()), told(place, name)


JOBS = 4
ROUGH = 16
"""Seeds from here on let half of all go wrong."""
RELIST_SECONDS = 3.0
"""A watch that lost something is told 410 so often, as happens when the API server forgets."""


@pytest.mark.parametrize("seed", [1, *(soak(seed) for seed in range(2, 32))])
def test_whatever_goes_wrong_on_the_way_the_end_is_the_same(place: World, proxy: Proxy, seed: int) -> None:
    node = place.node(f"{place.namespace}-n")
    operator = place.operator("--qps=1000", "--burst=1000", url=proxy.url)
    proxy.weather = Weather(seed, share=0.25 if seed < ROUGH else 0.5)
    lives = [Life(place, node, f"w{number}") for number in range(JOBS)]
    for life in lives:
        place.create(manifest(life.name, **SPEC))
    going, deadline, listed = list(lives), time.monotonic() + 240, time.monotonic()
    while going:
        going = [life for life in going if not life.step()]
        no_twins(place)
        if time.monotonic() - listed > RELIST_SECONDS:
            listed = time.monotonic()
            proxy.gone()
        assert operator.alive(), f"the operator ended: {operator.log.read_text()[-3000:]}\n{place.story()}"
        assert time.monotonic() < deadline, f"seed {seed}, {proxy.weather.seen}\n{place.story()}"
        time.sleep(0.05)
    print(f"seed {seed}: {dict(sorted(proxy.weather.seen.items()))}")
    for life in lives:
        found = life.summary()
        assert found["phase"] == "Complete" and found["succeeded"] == "0-1", found
        assert found["counted"] == 1, f"the shard that failed, and nothing else: {found}"
        assert found["pods made"] == {"-shard-0": 2, "-worker-0": 1, "-worker-1": 1}, found
    assert set(proxy.weather.seen) >= {*Weather.REQUESTS, *Weather.EVENTS} - {"503"}, "the weather was too good"


def no_twins(place: World) -> None:
    """No seat of a job has two pods that live."""
    living = [name for name, pod in place.pods().items() if lives(pod)]
    seats = Counter(name.rsplit("-", 1)[0] for name in living)
    assert not [seat for seat, count in seats.items() if count > 1], living


def lives(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running") and not pod["metadata"].get("deletionTimestamp")


SPEC: dict[str, Any] = {"runPolicy": {"cleanPodPolicy": "All"}}


@dataclass
class Life:
    """One job from its creation to its end, with one failed shard on the way; the test plays the kubelet for whatever pods there are."""

    place: World
    node: str
    name: str
    failed: bool = False
    ended: bool = False
    made: dict[str, str] = field(default_factory=dict)
    """uid -> name of every pod that was ever seen."""

    def step(self) -> bool:
        """Do what the kubelet would do now; True once the job is complete and its pods are gone."""
        status = self.place.status(self.name)
        pods = {name: pod for name, pod in self.place.pods().items() if name.startswith(f"{self.name}-")}
        for name, pod in pods.items():
            self.made[pod["metadata"]["uid"]] = name
            if pod["metadata"].get("deletionTimestamp"):
                self.place.remove(name)
            elif not pod["spec"].get("nodeName"):
                self.place.play(pod, self.node)
        if status.get("phase") == "Complete":
            return not pods
        if status.get("phase") == "Running" and not self.failed:
            self.failed = True
            self.place.end(status["shards"][0]["pod"], 1, message="shard fault")
        elif status.get("phase") == "Running" and status["restarts"]["counted"] == 1 and not self.ended:
            self.ended = True
            for name in sorted(pods, reverse=True):
                if "-worker-" in name:
                    self.place.end(name)
            self.place.end(status["shards"][0]["pod"])
        return False

    def summary(self) -> dict[str, Any]:
        """What must be the same however often the operator was ended."""
        status = self.place.status(self.name)
        children = {
            kind: sorted(
                item["metadata"]["name"].removeprefix(self.name)
                for item in self.place.items(kind)
                if item["metadata"]["name"].startswith(self.name)
            )
            for kind in ("services", "configmaps", "persistentvolumeclaims")
        }
        return {
            "phase": status["phase"],
            "conditions": sorted((it["type"], it["status"], it["reason"]) for it in status["conditions"]),
            "succeeded": status["workers"]["succeededIndexes"],
            "counted": status["restarts"]["counted"],
            "pods made": Counter(name.removeprefix(self.name).rsplit("-", 1)[0] for name in self.made.values()),
            **children,
        }
