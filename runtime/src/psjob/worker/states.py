"""The optimizer's state, fetched from the shards."""

from __future__ import annotations

from psjob.wire.frame import Kind
from psjob.worker.session import WorkerSession

SECONDS = 60.0


def block_states(session: WorkerSession) -> dict[int, bytes]:
    """STATE bodies by block (see optimizers.assemble_state). Raises Ending, also when they do not come in a minute."""
    with session.cond:
        session.states.clear()
    for block in session.layout.blocks:
        session.links[session.owner[block.index]].send(session.header(Kind.STATE, block=block.index, request=block.index + 1))
    session.wait(lambda: len(session.states) == len(session.layout.blocks), "the shards' optimizer state", SECONDS)
    return {number - 1: raw for number, raw in session.states.items()}
