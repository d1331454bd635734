"""What the processes of `tests.support.warm` have imported before they begin. Nothing here may start a thread."""

import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in (
    "torch", "torch.nn", "torch.optim", "torch.utils.data", "numpy", "psjob", "psjob.api.attach", "psjob.api.data", "psjob.api.reporting",
    "psjob.shard.server", "psjob_client.cli.main",
):  # fmt: skip
    importlib.import_module(name)
