"""A worker's session as a state machine: finding shards, joining, sending again, snapshots, stops, leaving. `psjob.worker` drives it."""
