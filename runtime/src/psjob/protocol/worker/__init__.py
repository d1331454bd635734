"""A worker's session as a state machine: finding shards, joining, sending again, cuts, stops, leaving. `psjob.worker` drives it."""
