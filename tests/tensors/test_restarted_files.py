"""Scripts as people have them, in one process: from each record a started one prints the lines and has the bits of the undisturbed one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.restarts.rewritten import FRAMEWORKS, SENTENCES, plain, scripts
from tests.tensors.restarted_files import restarts

SCRIPTS = {name: source for name, source in scripts().items() if name not in FRAMEWORKS}


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """What goes over an iterator is looked for in the whole heap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_restart_changes_no_line_and_no_bit(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, SCRIPTS[name])
    assert found.undisturbed.ending == "through" and len(found.undisturbed.lines) > 3, found.undisturbed
    assert not found.wrong, found.wrong[0]
    assert found.made > 8 and not found.refusals, found.refusals


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plain_loop_is_equal_or_refused(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, plain(SCRIPTS[name]), every_line=False)
    assert found.undisturbed.ending == "through", found.undisturbed.ending
    assert not found.wrong, found.wrong[0]
    assert found.made > 3 and all(any(sentence in why for sentence in SENTENCES) for why in found.refusals), found.refusals
