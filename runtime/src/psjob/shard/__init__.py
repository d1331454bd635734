"""A shard: receives, admits, applies, replies, snapshots. `python -m psjob.shard` is the process."""

from psjob.process.names import callable_as

callable_as(__name__, "psjob.api.data", "shard")
