"""A shard: receives, admits, applies, replies, snapshots. `python -m psjob.shard` is the process."""
