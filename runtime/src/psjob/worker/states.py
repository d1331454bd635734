"""What the shards tell an optimizer of its state."""

from __future__ import annotations

from psjob.wire.frame import Kind
from psjob.worker.session import WorkerSession

SECONDS = 60.0


def block_states(session: WorkerSession) -> dict[int, bytes]:
    """STATE bodies by block (see optimizers.assemble_state). Raises Ending, also when they do not come in a minute."""
    session.exchange.finish()
    with session.cond:
        session.states.clear()
    for block in session.blocks:
        session.links[session.owner[block.index]].send(session.header(Kind.STATE, block=block.index, request=block.index + 1))
    session.wait(lambda: len(session.states) == len(session.blocks), "the shards' optimizer state", SECONDS)
    return {number - 1: raw for number, raw in session.states.items()}
