"""What is shown of an error: the script's lines and torch's, and psjob's only if the error is psjob's own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from psjob.process import tracebacks
from psjob.process.errors import Refused

SCRIPT, LOADER = "/home/me/train.py", "/venv/torch/utils/data/dataloader.py"
API, INNER = f"{tracebacks.HERE}api/data.py", f"{tracebacks.HERE}worker/link.py"


def chain(*files: str, last: str) -> Callable[[], Any]:
    """Calls a function of each file in turn; that of the last one runs `last`."""
    call: Any = None
    for number, file in reversed(list(enumerate(files))):
        body = last if call is None else "return then()"
        names: dict[str, Any] = {"then": call, "Refused": Refused}
        exec(compile(f"def at_{number}():\n {body}", file, "exec"), names)  # noqa: S102
        call = names[f"at_{number}"]
    return call  # type: ignore[no-any-return]


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]


@pytest.mark.parametrize(
    ("files", "last", "left"),
    [
        ([SCRIPT, API, LOADER, INNER, SCRIPT], "{}['no']", [SCRIPT, LOADER, SCRIPT]),
        ([SCRIPT, API, LOADER], "raise RuntimeError('of one size')", [SCRIPT, LOADER]),
        ([SCRIPT, API], "raise ValueError('takes a word')", [SCRIPT]),
        ([SCRIPT, INNER, API], "raise Refused('no')", [SCRIPT]),
        ([SCRIPT, API], "1 / 0", [SCRIPT, API]),
        ([SCRIPT, API, INNER], "raise ValueError('not in shape')", [SCRIPT, API, INNER]),
        ([SCRIPT, API], "raise AssertionError", [SCRIPT, API]),
        ([SCRIPT, API, SCRIPT, API], "1 / 0", [SCRIPT, SCRIPT, API]),
    ],
)
def test_lines_that_are_shown(files: list[str], last: str, left: list[str]) -> None:
    with pytest.raises(Exception) as caught:
        chain(*files, last=last)()
    tracebacks.shorten(caught.value)
    assert files_of(caught.value) == left


def test_errors_that_led_to_it_are_shown_so_too() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            chain(SCRIPT, API, last="raise ValueError('takes a word')")()
        except ValueError:
            chain(SCRIPT, API, SCRIPT, last="{}['no']")()
    tracebacks.shorten(caught.value)
    assert caught.value.__context__ is not None and files_of(caught.value.__context__) == [SCRIPT]
    assert files_of(caught.value) == [SCRIPT, SCRIPT]


def test_the_text_of_a_loader_process_is_shown_so_too() -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{LOADER}", line 1, in fetch\n    data = self.dataset[3]\n           ^^^^^^^^^\n'
        f'  File "{API}", line 2, in __getitem__\n    return self.theirs[3]\n           ^^^^^^^^^\n'
        f'  File "{SCRIPT}", line 3, in __getitem__\n    return {{}}["no"]\nKeyError: no'
    )
    error = RuntimeError(text)
    tracebacks.shorten(error)
    assert tracebacks.HERE not in str(error)
    assert str(error).endswith(f'File "{SCRIPT}", line 3, in __getitem__\n    return {{}}["no"]\nKeyError: no')
    assert "dataset[3]" in str(error) and "theirs" not in str(error)
