"""A library's module of psjob begins as the library is imported, or at once where it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psjob.process import startup

LIBRARY = "library_of_this_test"
HOME = "home_of_this_test"


@pytest.fixture
def _library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / LIBRARY).mkdir()
    (tmp_path / LIBRARY / "__init__.py").write_text("from library_of_this_test.inner import value\n")
    (tmp_path / LIBRARY / "inner.py").write_text("value = 1\n")
    text = f"import {LIBRARY}\n\ndef begin():\n    {LIBRARY}.value += 1\n"
    (tmp_path / f"{HOME}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, startup.ImportWatch)])
    monkeypatch.setattr(startup, "HOMES", {LIBRARY: HOME})
    yield
    for name in (LIBRARY, f"{LIBRARY}.inner", HOME):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("first", [True, False])
def test_it_begins_when_the_library_is_there(first: bool) -> None:
    if first:
        __import__(LIBRARY)
    startup.begin_with_libraries()
    startup.begin_with_libraries() if not first else None
    __import__(LIBRARY)
    assert sys.modules[LIBRARY].value == 2
    assert sys.modules[LIBRARY].__spec__ is not None
    assert not any(isinstance(each, startup.ImportWatch) for each in sys.meta_path[1:]), "one finder"


@pytest.mark.usefixtures("_library")
def test_a_library_that_is_not_installed_is_still_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "HOMES", {"no_such_library_of_this_test": HOME})
    startup.begin_with_libraries()
    with pytest.raises(ModuleNotFoundError, match="no_such_library_of_this_test"):
        __import__("no_such_library_of_this_test")
