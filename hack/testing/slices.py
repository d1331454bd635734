"""A pytest plugin: which of the tests marked `rotating` a run takes.

`--slice K` takes a sixth of them; CI takes K from the number of commits, so that runs after six different remainders have run all.
`--touched REVISION` adds tests whose file imports what changed since that revision, as far as they fit `TOUCHED_SECONDS`.
`python -m hack.testing.slices` lists all rotating tests with their slice; `--current` prints the slice of this commit.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from hack.testing.runners import load_of

REPO = Path(__file__).resolve().parents[2]
SLICES = 6
TOUCHED_SECONDS = 120.0
"""Guessed seconds of the tests that a change adds to a slice."""
PACKAGES = ("psjob", "psjob_operator", "psjob_client", "tests", "hack")


def slice_of(nodeid: str) -> int:
    """0 to 5, forever the same for one name."""
    return zlib.crc32(nodeid.encode()) % SLICES


def current(commits: int) -> int:
    """The slice of a run on a branch of so many commits."""
    return commits % SLICES


def importers(changed: Iterable[str], imports: Mapping[str, set[str]]) -> set[str]:
    """Test modules that changed, or import a changed module themselves or through other modules of the tests.

    `imports` has for each module of the tests what it imports directly.
    """
    reached = set(changed)
    grew = True
    while grew:
        more = {module for module, named in imports.items() if module not in reached and named & reached}
        grew = bool(more)
        reached |= more
    return {module for module in reached if module in imports and module.rpartition(".")[2].startswith("test_")}


def module_of(path: str) -> str | None:
    """The module of a file of the repository, such as `psjob.wire.frame`; None for other files."""
    if not path.endswith(".py"):
        return None
    name = path.removesuffix(".py").removesuffix("/__init__").partition("/src/")
    return (name[2] or name[0]).replace("/", ".")


def commits() -> int:
    """How many commits the branch has."""
    return int(_git("rev-list", "--count", "HEAD"))


def touched(revision: str) -> set[str]:
    """Test modules that what changed since `revision` concerns."""
    import grimp

    changed = {module for path in _git("diff", "--name-only", revision, "HEAD").split() if (module := module_of(path))}
    graph = grimp.build_graph(*PACKAGES, include_external_packages=False, cache_dir=None)
    tests = {module for module in graph.modules if module.startswith("tests.")}
    return importers(changed, {module: graph.find_modules_directly_imported_by(module) for module in tests})


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True).stdout


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slices")
    group.addoption("--slice", type=int, metavar="K", help=f"of the tests marked rotating, only those of slice K (0 to {SLICES - 1})")
    group.addoption("--touched", metavar="REVISION", help="with --slice: rotating tests too whose file imports what changed since then")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, revision = config.getoption("slice"), config.getoption("touched")
    if number is None:
        return
    drawn = [item for item in items if not rotates(item) or slice_of(item.nodeid) == number]
    others = set(items).difference(drawn)
    modules = touched(revision) if revision else set()
    concerned = [item for item in items if item in others and module_of(item.nodeid.partition("::")[0]) in modules]
    added = fitting(concerned)
    chosen = {*drawn, *added}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    lines = [f"slice {number} of {SLICES}:", *(f"  {item.nodeid}" for item in drawn if rotates(item))]
    if revision:
        left = len(concerned) - len(added)
        lines += [f"touched since {revision} ({left} more are left to make soak):", *(f"  {item.nodeid}" for item in added)]
    config.stash[TOLD] = lines


TOLD = pytest.StashKey[list[str]]()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return config.stash.get(TOLD, [])


def rotates(item: pytest.Item) -> bool:
    """Does it take its turn? Of a rotating test, parameters that are left to soak do not."""
    return item.get_closest_marker("rotating") is not None and item.get_closest_marker("soak") is None


def fitting(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """As many of these as fit `TOUCHED_SECONDS`, in an order that their names give."""
    chosen: list[pytest.Item] = []
    seconds = 0.0
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        seconds += load_of(item).seconds
        if seconds <= TOUCHED_SECONDS:
            chosen.append(item)
    return chosen


class _Listing:
    """Prints every rotating test with its slice."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in sorted(session.items, key=lambda item: (slice_of(item.nodeid), item.nodeid)):
            print(f"{slice_of(item.nodeid)} {item.nodeid}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--current"]:
        print(current(commits()))
    else:
        sys.exit(
            pytest.main(
                ["-p", "no:terminal", "-o", "addopts=", "--collect-only", "-m", "rotating and not soak", str(REPO / "tests")], [_Listing()]
            )
        )
