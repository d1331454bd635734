"""The resume record: what a worker needs to go on where it stood."""
