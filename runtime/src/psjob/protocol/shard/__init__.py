"""The control side of a shard: `machine.ShardMachine` decides, `psjob.shard.control` carries out."""
