"""Where the packages lie that a script imports and did not write: what is defined there is not the script's."""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

HERE: Final = f"{Path(__file__).parents[1]}/"


@cache
def places() -> tuple[str, ...]:
    """Folders, each with a slash at its end: Python's own, an environment's, the system's, the user's, and the one that holds torch.

    Torch may lie in none of the others, as in a folder of PYTHONPATH. If the script lies in the same folder, only torch is meant.
    """
    found = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    found += site.getsitepackages() if hasattr(site, "getsitepackages") else []
    found += [site.getusersitepackages()] if hasattr(site, "getusersitepackages") else []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        torch = Path(spec.origin).parent
        found.append(str(torch if any(each.is_relative_to(torch.parent) for each in _of_script()) else torch.parent))
    return HERE, *dict.fromkeys(f"{Path(place)}/" for place in found)


def _of_script() -> list[Path]:
    """Where the script may lie."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return [Path.cwd(), *(Path(name).absolute() for name in (sys.path[0], file) if name)]
