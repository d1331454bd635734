"""The resume record: what a worker needs to continue where it stood."""
