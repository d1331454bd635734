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
    """Folders, each with a slash at its end: Python's own, an environment's, the system's, the user's, and what pip has filled besides.

    That may be a folder of PYTHONPATH, for torch too. If the script lies in it, it is the script's, and only torch in it is not.
    """
    found = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    found += site.getsitepackages() if hasattr(site, "getsitepackages") else []
    found += [site.getusersitepackages()] if hasattr(site, "getusersitepackages") else []
    found += [place for place in sys.path if not _is_of_script(Path(place)) and any(Path(place).glob("*.dist-info"))]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        torch = Path(spec.origin).parent
        found.append(str(torch if _is_of_script(torch.parent) else torch.parent))
    return HERE, *dict.fromkeys(f"{Path(place)}/" for place in found)


def _is_of_script(folder: Path) -> bool:
    """May the script lie in it?"""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = [Path.cwd(), *(Path(name).absolute() for name in (sys.path[0], file) if name)]
    return any(each.is_relative_to(folder.absolute()) for each in script)
