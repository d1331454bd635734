"""docs/contributing/founding.md: the command that simulates schedules prints the figures of its line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests import warm
from tests.docs.pages import COMMANDS


def test_the_schedules_have_the_figures_of_their_line(tmp_path: Path) -> None:
    ((words, figure),) = [one for one in COMMANDS if one[0].startswith("psjob simulate schedule")]
    code, said = warm.run(tmp_path, shlex.split(words)[1:])
    assert code == 0, said
    wanted = re.findall(r"`([^`]+)`", figure)
    assert wanted and [one for one in wanted if one not in said] == []
