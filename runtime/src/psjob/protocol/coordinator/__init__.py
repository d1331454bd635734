"""Members, clocks, snapshots and the end of a run: the decisions of the process that has shard 0."""
