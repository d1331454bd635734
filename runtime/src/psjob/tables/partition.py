"""Which shard has which row: id → bucket by a hash that never changes, bucket → shard by a table that is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from psjob.tables.mixing import splitmix64

BUCKETS: Final = 1024
"""Four for each of the most shards that a job may have."""
_BITS: Final = BUCKETS.bit_length() - 1


def bucket_of(ids: torch.Tensor) -> torch.Tensor:
    """The bucket of each id (int64), from 0 to BUCKETS - 1; the same in every run, whatever the number of shards."""
    return (splitmix64(ids) >> (64 - _BITS)) & (BUCKETS - 1)


@dataclass(frozen=True)
class Partition:
    """`owners[bucket]` is a shard. The table with the higher generation holds. Raises ValueError where it is not whole."""

    generation: int
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.generation) is not int or self.generation < 1:
            raise ValueError(f"a partition's generation is a whole number from 1, got {self.generation!r}")
        if len(self.owners) != BUCKETS or not all(type(shard) is int and shard >= 0 for shard in self.owners):
            raise ValueError(f"a partition names a shard for each of {BUCKETS} buckets, got {len(self.owners)}")

    @classmethod
    def even(cls, shards: int, generation: int = 1) -> Partition:
        """Buckets dealt out in turn."""
        return cls(generation, tuple(bucket % shards for bucket in range(BUCKETS)))

    def buckets(self, shard: int) -> torch.Tensor:
        """A mask of BUCKETS: which of them `shard` has."""
        return torch.tensor(self.owners, device="cpu") == shard

    def shard_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The shard of each id, as int64."""
        return torch.tensor(self.owners, device="cpu")[bucket_of(ids)]

    def to_json(self) -> dict[str, Any]:
        """For a welcome or a manifest."""
        return {"generation": self.generation, "owners": list(self.owners)}

    @classmethod
    def from_json(cls, obj: object) -> Partition:
        """Read what `to_json` gave. Raises ValueError with a sentence."""
        if not isinstance(obj, dict) or not isinstance(obj.get("owners"), list):
            raise ValueError("a partition is {generation, owners: [shard of each bucket]}")
        return cls(obj.get("generation", 0), tuple(obj["owners"]))
