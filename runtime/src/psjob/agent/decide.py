"""What becomes of a worker's processes when some of them have ended, and what their environment tells them. Pure.

Their names are torchrun's, and psjob's own beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psjob import contract

LOCALHOST = "127.0.0.1"


def environment(
    given: Mapping[str, str], index: int, workers: int, local: int, processes: int, port: int, sockets: Sequence[int], rewinds: int
) -> dict[str, str]:
    """Of process `local` of worker `index`: `given` with its names. At `port` the processes of this worker may meet."""
    rank, world = index * processes + local, workers * processes
    return {
        "OMP_NUM_THREADS": "1",  # as torchrun has it: a thread a core in each process would be too many
        **given,
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(processes),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "GROUP_RANK": str(index),
        "GROUP_WORLD_SIZE": str(workers),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        contract.ENV_LOCAL: str(local),
        contract.ENV_SOCKETS: ",".join(map(str, sockets)),
        contract.ENV_REWINDS: str(rewinds),
    }


RUNTIME = frozenset({
    contract.EXIT_RETRY, contract.EXIT_FENCED, contract.EXIT_REFUSED, contract.EXIT_CHECKPOINT_LOST, contract.EXIT_HUNG,
    contract.EXIT_DEVICE_LOST,
})  # fmt: skip
"""Exit codes with which psjob ends a process: the planner has an answer to each, and starting again in place is none."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended. `code` as a container's: 128 + signal where a signal ended it."""

    local: int
    code: int


@dataclass(frozen=True)
class ProcessGroup:
    """`ended` in the order in which they did. `joined`: they have been in the job. `again`: process 0 asks for a start of all."""

    processes: int
    ended: Sequence[Ended] = ()
    joined: bool = False
    again: bool = False
    stopping: bool = False
    """The worker was asked to go."""
    spent: bool = False
    """The one start in place after a death was made already."""


@dataclass(frozen=True)
class Wait:
    """Nothing is to be done yet."""


@dataclass(frozen=True)
class StartAgain:
    """End what is left and start all processes in place. `died`: who made it necessary, None where the job asked for it."""

    died: Ended | None


@dataclass(frozen=True)
class End:
    """End what is left, after `patient` ones had time to do so by themselves, and leave with `code`."""

    code: int
    patient: bool


def verdict(now: ProcessGroup) -> Wait | StartAgain | End:
    """What is to be done."""
    if now.again and not now.stopping:
        return StartAgain(None)
    failed = [ended for ended in now.ended if ended.code]
    if not failed:
        return End(0, patient=True) if len(now.ended) == now.processes else Wait()
    # The others of a worker see at once that one has died; what they make of that says less than the death.
    first = next((ended for ended in failed if ended.code not in RUNTIME), failed[0])
    if first.code in RUNTIME or now.stopping:
        return End(first.code, patient=True)
    if now.joined and not now.spent:
        return StartAgain(first)
    return End(first.code, patient=False)
