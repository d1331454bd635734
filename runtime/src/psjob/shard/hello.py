"""What a shard says of itself when it dials the coordinator."""

from __future__ import annotations

from typing import Any


def hello_body(index: int, epoch: int, view: int, serving: bool, attempt: int, mode: str = "", early: bool = False) -> dict[str, Any]:
    """A shard's hello. `mode` is the one that it serves. `early`: it only announces its view while it still starts."""
    return {"role": "shard", "scheme": "none", "index": index, "epoch": epoch, "view": view, "serving": serving, "attempt": attempt,
            "mode": mode, "early": early}  # fmt: skip
