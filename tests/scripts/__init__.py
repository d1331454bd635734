"""Scripts as people write them, in jobs."""

IMPORTS = ["tests.scripts.imports"]
"""What their processes have imported before they begin (see `tests.warm`)."""
