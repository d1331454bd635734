"""What a process of a worker is told by its environment: torchrun's names, and psjob's own beside them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
