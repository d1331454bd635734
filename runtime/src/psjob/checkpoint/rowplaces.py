"""What a manifest says of tables of rows: their specs, who had which buckets, and each shard's chain of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psjob.checkpoint.files import FileFact
from psjob.tables import Partition, TableSpec

MAX_CHAIN: Final = 8
"""Files of a chain, the first of which holds all rows: each is another that may be damaged, and another to read back."""


@dataclass(frozen=True)
class RowPlaces:
    """`chains[shard]` are files, the oldest first: all rows, then what changed. `versions[shard]` are the updates of each table there."""

    specs: tuple[TableSpec, ...]
    partition: Partition
    chains: tuple[tuple[str, ...], ...]
    versions: tuple[tuple[int, ...], ...]
    files: tuple[FileFact, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless every shard has a chain of listed files and a version a table."""
        listed = {fact.name for fact in self.files}
        for shard, (chain, versions) in enumerate(zip(self.chains, self.versions, strict=True)):
            if not 1 <= len(chain) <= MAX_CHAIN or not listed.issuperset(chain):
                raise ValueError(f"rows of shard {shard} are in {len(chain)} files, expected 1 to {MAX_CHAIN} of those that are listed")
            if len(versions) != len(self.specs) or not all(type(n) is int and n >= 0 for n in versions):
                raise ValueError(f"rows of shard {shard} have {len(versions)} versions, there are {len(self.specs)} tables")
        if max(self.partition.owners) >= len(self.chains):
            raise ValueError(f"buckets are with shard {max(self.partition.owners)}, rows with {len(self.chains)} shards")

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            "specs": [spec.to_json() for spec in self.specs],
            "partition": self.partition.to_json(),
            "chains": [list(chain) for chain in self.chains],
            "versions": [list(versions) for versions in self.versions],
            "files": [fact.to_json() for fact in self.files],
        }

    @classmethod
    def from_json(cls, obj: object) -> RowPlaces:
        """Read what `to_json` gave. Raises ValueError, TypeError or KeyError where it is not whole."""
        if not isinstance(obj, Mapping):
            raise ValueError("places of rows are an object")
        return cls(
            tuple(TableSpec.from_json(spec) for spec in obj["specs"]),
            Partition.from_json(obj["partition"]),
            tuple(tuple(str(name) for name in chain) for chain in obj["chains"]),
            tuple(tuple(versions) for versions in obj["versions"]),
            tuple(FileFact.from_json(fact) for fact in obj["files"]),
        )
