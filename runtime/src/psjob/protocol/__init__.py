"""The protocol as pure state machines: coordinator, a shard's control side, a worker's session. No clock, socket, disk, thread or torch."""
