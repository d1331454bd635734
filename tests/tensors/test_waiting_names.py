"""Of thousands of workers for whom an answer waits a few are told by rank, of the others how many they are."""

from __future__ import annotations

from psjob.protocol.worker.events import ShardWaits
from psjob.shard.pending import MOST_NAMED, named


def test_few_are_told_by_rank_and_many_by_number() -> None:
    assert named([3, 5]) == "[3, 5]"
    assert named(range(MOST_NAMED)) == str(list(range(MOST_NAMED)))
    assert named(range(4000)) == f"{list(range(MOST_NAMED))} and {4000 - MOST_NAMED} more"


def test_a_worker_writes_how_many_more_there_are() -> None:
    body = {"workers": [1, 2], "more": 7, "for": "block 0", "seconds": 2.0}
    assert ShardWaits.of(3, body).text == "shard 3 waits for workers [1, 2] and 7 more (block 0, 2.0 s)"
    assert ShardWaits.of(3, body | {"more": 0}).text == "shard 3 waits for workers [1, 2] (block 0, 2.0 s)"


def test_a_shard_that_has_every_gradient_waits_for_the_other_shards() -> None:
    body = {"workers": [], "more": 0, "for": "block 0", "seconds": 92.9}
    assert ShardWaits.of(0, body).text == "shard 0 waits until all shards can choose which gradients count (block 0, 92.9 s)"
