"""Frames and the transports that carry them."""
