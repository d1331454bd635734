"""`python -m tests.scripts.notebook NOTEBOOK` runs its cells as a kernel does: in one namespace, each cell's text a file of its own."""

import code
import json
import linecache
import sys
from pathlib import Path
from typing import NoReturn


class Kernel(code.InteractiveInterpreter):
    """One that ends with the first cell that fails."""

    def showtraceback(self) -> NoReturn:
        super().showtraceback()
        raise SystemExit(1)


def main() -> None:
    sys.ps1 = "In : "
    kernel = Kernel({"__name__": "__main__"})
    for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text())["cells"]):
        if cell["cell_type"] == "code":
            text, name = "".join(cell["source"]), f"<cell {number}>"
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            kernel.runcode(compile(text, name, "exec"))


if __name__ == "__main__":
    main()
