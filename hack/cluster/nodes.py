"""Real nodes."""
