"""A shard: receives, admits, applies, replies, snapshots. `python -m psjob.shard` is the process."""

from psjob.names import callable_as

callable_as(__name__, "psjob.data", "shard")
