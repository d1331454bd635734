"""`python -m psjob.agent COMMAND…`: the processes of one worker."""

from __future__ import annotations

import os
import sys

from psjob import contract
from psjob.agent.running import Agent
from psjob.process import config
from psjob.process.errors import Refused, exit_refused


def main(command: list[str]) -> int:
    """Run `command` once for each process of this worker. Its exit code."""
    known = {**os.environ, contract.ENV_LOCAL: "0", contract.ENV_SOCKETS: "0"}  # the agent's own place is that of process 0
    try:
        place = config.place(known)
        if place is None or place.role != "worker":
            raise Refused(f"psjob.agent starts the processes of a worker of a job, and {contract.ENV_ROLE} is not worker; see psjob run")
        if not command:
            raise Refused("psjob.agent was given no command; give it the one that a worker of one process has")
    except Refused as refused:
        exit_refused(str(refused))
        raise
    return Agent(place, command, os.environ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
