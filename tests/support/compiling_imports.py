"""What processes have imported that make steps with torch's own optimizers, or train stages, beside `tests.support.warm_imports`.

That is torch's compiler: it takes longer to import than a script of `idioms/` runs, and most optimizers load it at their first call.
"""

import importlib

SKLEARN = ("sklearn.datasets", "sklearn.model_selection")
"""Of the digits example, whose four workers would each import it."""

for name in (
    "tests.support.warm_imports", "torch._dynamo", "torch._dynamo.backends.debugging", "torch._inductor.compile_fx",
    "torch.distributed.pipelining", *SKLEARN,
):  # fmt: skip
    importlib.import_module(name)
