"""Training loops of other libraries, in jobs."""

OFFLINE = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
"""Their environment: nothing is fetched, and no GPU is used."""
IMPORTS = ["tests.frameworks.imports"]
"""What their processes have imported before they begin (see `tests.support.warm`)."""
