"""What a shard says of itself when it dials the coordinator."""

from __future__ import annotations

from typing import Any


def hello_body(
    index: int, attempt: int, view: int, serving: bool, recovery: int, mode: str = "", carried: int | None = 0, early: bool = False
) -> dict[str, Any]:  # fmt: skip
    """A shard's hello. `mode` is the one that it serves. `early`: it only announces its view while it still starts.

    `carried` is the last order that it carried out, where the coordinator decides; None: one broke off.
    """
    return {"role": "shard", "index": index, "attempt": attempt, "view": view, "serving": serving, "recovery": recovery,
            "mode": mode, "carried": carried, "early": early}  # fmt: skip
