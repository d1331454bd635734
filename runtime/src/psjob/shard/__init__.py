"""A shard: receives, admits, applies, replies and takes snapshots."""
