"""A worker's side of training: send blocks, wait with deadlines, retry."""
