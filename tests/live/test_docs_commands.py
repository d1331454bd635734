"""The commands and files of the PAGES, run as they stand there: each works, and prints what follows it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import warm
from tests.docs.pages import BLOCK, DOCS, PAGES
from tests.soaking import rotating

QUICK = {"convert.md"}
"""They need no runtime."""
PROGRAMS = {
    "psjob": ["-m", "psjob_client.cli.main"],
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--local-addr", "127.0.0.1"],
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""A machine's own name may lead nowhere."""
FORGIVEN = " || true"


@pytest.mark.parametrize("page", [page if page in QUICK else rotating(page) for page in PAGES])
def test_a_page_does_what_it_says(tmp_path: Path, page: str) -> None:
    said, ran = "", 0
    for kind, text in BLOCK.findall((DOCS / page).read_text()):
        if kind in ("yaml", "python") and text.startswith("# "):
            (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                code, said = typed(tmp_path, line, warm.LIGHT if page in QUICK else warm.PRELOADED)
                ran += 1
                assert (code == 0 or line.endswith(FORGIVEN)) and "Traceback" not in said, f"{line}\n{said}"
        elif kind == "text":
            assert all(shown(line, said) for line in text.splitlines()), f"{text}\nis not in\n{said}"
    assert ran >= 1


def typed(folder: Path, line: str, preloaded: Sequence[str]) -> tuple[int, str]:
    """Exit code of a command, and what it printed. It and its processes are forks."""
    program, *words = shlex.split(line.removesuffix(FORGIVEN))
    streams = folder / ".printed", folder / ".told"
    started = warm.start_python(folder, PROGRAMS[program] + words, LOOPBACK, *streams, preloaded)
    try:
        return started.wait(100), "".join(started.communicate())
    finally:
        started.kill()


def shown(line: str, said: str) -> bool:
    """The line, in which `…` stands for what differs from run to run, is in what was said."""
    return re.search(".*".join(re.escape(part) for part in line.split("…")), said) is not None
