"""The house keeps its layout: folders, sizes, and what no file may hold."""

from __future__ import annotations

import ast
import operator
import re
import sysconfig
from pathlib import Path

import pytest

from tests.support.sources import CLIENT, OPERATOR, ROOT, RUNTIME, holding, sources


def test_folder_operator_shadows_nothing() -> None:
    """Python's own module `operator` is what any package imports by this name, in the checkout too."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.__file__ is not None
    assert Path(operator.__file__).is_relative_to(sysconfig.get_path("stdlib"))


def test_the_top_of_the_runtime_is_the_public_face() -> None:
    assert [file.name for file in RUNTIME.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("package", [RUNTIME, OPERATOR, CLIENT], ids=["runtime", "operator", "client"])
def test_no_two_rooms_import_each_other(package: Path) -> None:
    """Rooms are the folders of a package; an import for only types counts too."""
    arrows: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parts[0]
        for name in imported(file):
            parts = name.split(".")
            if len(parts) > 1 and parts[0] == package.name and parts[1] != room and (package / parts[1]).is_dir():
                arrows.setdefault(room, set()).add(parts[1])
    assert circle(arrows) is None


def imported(file: Path) -> list[str]:
    """Dotted names of all modules that a file imports; `from a import b` gives `a.b`."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def circle(arrows: dict[str, set[str]]) -> list[str] | None:
    """A way along the arrows that ends where it began, or None."""
    done: set[str] = set()

    def walk(room: str, way: list[str]) -> list[str] | None:
        if room in way:
            return [*way[way.index(room) :], room]
        if room in done:
            return None
        found = next((found for to in sorted(arrows.get(room, ())) if (found := walk(to, [*way, room]))), None)
        done.add(room)
        return found

    return next((found for room in sorted(arrows) if (found := walk(room, []))), None)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) is None


def test_files_have_one_subject_in_700_lines() -> None:
    long = {str(file.relative_to(ROOT)): n for file in sources() if (n := len(file.read_text().splitlines())) > 700}
    assert not long, f"split these files: {long}"


TESTS = ROOT / "tests"


def test_no_file_of_tests_imports_another_one() -> None:
    """What several need is in a module of their folder that is no test, or in `tests/support`."""
    assert not holding(r"^\s*(from|import) tests\.(.*\.)?test_|^\s*from tests\.\w+ import (.*\b)?test_", sorted(TESTS.rglob("*.py")))


def test_no_file_of_tests_is_longer_than_800_lines() -> None:
    assert not {str(file.relative_to(ROOT)): n for file in TESTS.rglob("test_*.py") if (n := len(file.read_text().splitlines())) > 800}


def test_nothing_runs_what_it_reads() -> None:
    assert not holding(r"^\s*(import|from)\s+(pickle|cloudpickle|dill|marshal|shelve)\b", sources())
    assert not holding(r"\btorch\.load\(|(?<![.\w])(eval|exec)\(|\byaml\.(load|unsafe_load|full_load)\(", sources())


def test_kopf_only_wakes() -> None:
    stateful = r"kopf\.(index|timer|daemon)\b|kopf\.on\.(create|update|delete|resume|field|timer|daemon)\b"
    assert not holding(stateful, sources())


MADE = {"empty", "zeros", "ones", "full", "tensor", "arange", "randperm", "randn", "rand", "randint", "as_tensor", "eye", "linspace"}
"""Functions of torch that make a tensor on the default device, if they are told of none."""
WITHOUT_VALUES = {"empty", "zeros", "ones"}
"""Those that make it of the default dtype, if they are told of none."""


def test_tensors_name_their_device() -> None:
    """A script's default device and dtype are not the library's."""
    odd = []
    for file in sorted(RUNTIME.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.") and node.func.attr in MADE:  # type: ignore[attr-defined]
                words = {keyword.arg for keyword in node.keywords}
                wanted = {"device"} | ({"dtype"} if node.func.attr in WITHOUT_VALUES else set())  # type: ignore[attr-defined]
                odd += [f"{file.relative_to(ROOT)}:{node.lineno}"] if wanted - words and None not in words else []
    assert not odd


def test_nothing_is_a_stub() -> None:
    assert not holding(r"NotImplementedError|\b(TODO|FIXME|XXX)\b", sources())


def test_requirements_are_pinned_by_hash() -> None:
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        text = file.read_text()
        assert "://" not in text, f"{file.name} names an address"
        pins = re.findall(r"^[A-Za-z0-9_.\-\[\]]+==", text, re.MULTILINE)
        blocks = [block for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE) if block.strip()]
        assert pins
        assert all("--hash=sha256:" in block for block in blocks), f"{file.name} has a requirement without a hash"


def test_distributions_ask_for_what_is_pinned() -> None:
    wanted = re.findall(r'^  "([a-z0-9\-]+)[<>=]', (ROOT / "operator" / "pyproject.toml").read_text(), re.MULTILINE)
    pins = (ROOT / "requirements" / "operator.txt").read_text()
    assert wanted
    assert [name for name in wanted if not re.search(rf"^{name}==", pins, re.MULTILINE)] == []
    assert "torch" not in pins


def test_one_version_everywhere() -> None:
    import psjob_operator

    version = psjob_operator.__version__
    assert f'\n__version__ = "{version}"\n' in (ROOT / "runtime" / "src" / "psjob" / "__init__.py").read_text()
    for name in ("operator", "runtime", "client"):
        assert f'\nversion = "{version}"\n' in (ROOT / name / "pyproject.toml").read_text()
    chart = (ROOT / "charts" / "psjob" / "Chart.yaml").read_text()
    assert re.search(rf'^appVersion: "?{re.escape(version)}"?$', chart, re.MULTILINE)


def test_make_help_names_every_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    described = re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE)
    assert sorted(phony[1].split()) == sorted(described)
