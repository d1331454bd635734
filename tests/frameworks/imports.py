"""What the processes of these tests have imported before they begin, beside those of `tests.support.warm_imports`."""

import importlib
import os

os.environ.update(TRANSFORMERS_OFFLINE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
for name in (
    "tests.support.warm_imports",
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "lightning.pytorch",
):
    importlib.import_module(name)
