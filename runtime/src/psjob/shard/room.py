"""Is there room for the gradients that a shard has to hold?"""

from __future__ import annotations

from psjob.modes import ServedMode


def room_problem(workers: int, mode: ServedMode, pushes: int, budget: int, clips: bool = False) -> str | None:
    """Why a shard cannot hold the whole pushes that a decided mode, or a norm, waits for; None: it can.

    `pushes`: bytes of one push of each worker together; a worker of a stage pushes the blocks of its stage alone.
    In other modes workers keep to their shares of `budget` by themselves.
    """
    whole = 2 if mode.may_go(0, 0, True) else 1  # one that waits for its decision, one that comes
    held = whole * pushes if mode.decided or clips else 0
    if held <= budget:
        return None
    mib, what = -(-held >> 20), f"{whole} whole pushes" if whole > 1 else "a whole push"
    why = f"in mode {mode.name}" if mode.decided else "to clip by the norm of the whole gradient,"
    return (
        f"{why} a shard holds {what} of each of {workers} workers, {mib} MiB, and its limit of gradients is "
        f"{budget >> 20} MiB; set training.gradientMebibytes to {mib}, or take more shards"
    )
