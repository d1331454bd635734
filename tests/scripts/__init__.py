"""Scripts as people write them, in jobs."""
