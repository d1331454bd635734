"""The values with which a row begins: a function of (seed, table, id) alone, the same on every shard and after every restore.

A counter-based generator: one 64-bit hash of the id gives each row two 32-bit keys, and a 32-bit hash of (key, column) gives the
numbers. So no row depends on another or on when it was first asked for.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from psjob.tables import rules
from psjob.tables.mixing import seed_of, splitmix64
from psjob.tables.spec import TableSpec

_PART: Final = 1 << 16
_STEP: Final = -1640531527
"""0x9E3779B9 as int32."""


def initial_rows(spec: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """First values of rows `ids` (int64), of the table's dtype and shape [n, dim]."""
    rule = rules.named(spec.rule)
    if isinstance(rule, rules.Combine):
        return torch.full((len(ids), spec.dim), rule.identity(spec.torch_dtype), dtype=spec.torch_dtype, device="cpu")
    out = torch.zeros(len(ids), spec.dim, dtype=torch.float32, device="cpu")
    if spec.init == "zeros" or not spec.scale:
        return out
    pairs = (spec.dim + 1) // 2
    seed = seed_of(spec.seed, spec.name)
    step = max(1, _PART // spec.dim)
    for start in range(0, len(ids), step):
        keys = splitmix64(splitmix64(ids[start : start + step] ^ seed)).view(torch.int32).view(-1, 2)
        first, second = _uniform(keys[:, 0], pairs), _uniform(keys[:, 1], pairs)
        if spec.init == "uniform":
            low, high = first.mul_(2).sub_(1), second.mul_(2).sub_(1)
        else:  # Box and Muller, A note on the generation of random normal deviates, 1958
            radius = first.neg_().add_(1).log_().mul_(-2).sqrt_()  # of 1 - u, which is never 0
            angle = second.mul_(2 * math.pi)
            low, high = radius * angle.cos(), radius.mul_(angle.sin_())
        part = out[start : start + step]
        part[:, :pairs] = low
        part[:, pairs:] = high[:, : spec.dim - pairs]
    return out.mul_(spec.scale)


def _uniform(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """Multiples of 2^-24 in [0, 1) for each (key, column): lowbias32 (Wellons, Prospecting for hash functions, 2018)."""
    x = keys[:, None] + torch.arange(columns, dtype=torch.int32, device="cpu").mul_(_STEP)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
