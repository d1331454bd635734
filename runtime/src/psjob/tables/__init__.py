"""Tables of rows: embeddings as a shard holds them. Pure: no I/O, clock or random source; seeds and clocks are arguments."""

from __future__ import annotations

from psjob.tables.merge import merge
from psjob.tables.partition import BUCKETS, Partition, bucket_of
from psjob.tables.spec import TableSpec
from psjob.tables.table import RowTable

__all__ = ["TableSpec", "RowTable", "merge", "Partition", "bucket_of", "BUCKETS"]
