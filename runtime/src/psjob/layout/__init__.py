"""Where each tensor lies: blocks, buffers, memory that is lent."""
