"""Members, clocks, cuts and the end of a run, inside shard 0's process."""
