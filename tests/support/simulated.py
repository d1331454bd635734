"""`psjob simulate` with the simulator in the process of the test."""

from __future__ import annotations

from unittest import mock

from psjob.simulate import cli
from psjob_client.cli import simulate as command
from tests.support.typed import built


def asked(argv: list[str]) -> int:
    """`psjob simulate ARGV`, with the simulator in this process."""
    codes: list[int] = []
    with mock.patch.object(command, "start", lambda does, given: codes.append(cli.run_asked(command.request(does, given)))):
        built(command.cli).main(argv, prog_name="psjob simulate", standalone_mode=False)
    return codes[0]
