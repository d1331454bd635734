"""The largest magnitudes of a block, by place: k = ⌈ratio · length⌉ at most, 8 bytes each.

The threshold is the k-th largest of a sample spread evenly over the block. Of what lies above it the k largest are taken, so one pass
over the block replaces a sort of it. The residual is added to the next gradient. Sources: Stich, Cordonnier, Jaggi,
"Sparsified SGD with Memory" (2018); Lin et al., "Deep Gradient Compression" (2018), for the sampled threshold.
"""

from __future__ import annotations

import math

import torch

from psjob.codecs.base import CodecError, CodecKey

ENTRY = 8
SAMPLE = 16384
"""Elements looked at for the threshold; a block of no more is looked at whole."""
MARGIN = 1.25
"""How many times k the threshold aims at, so that a sample that is a little off still gives k."""


class TopK:
    """Body: the places (int32, rising), then the values (float32)."""

    name = "topk"
    number = 4
    feeds_back = True

    def bound(self, length: int, ratio: float) -> int:
        """A place and a value for each of k."""
        return ENTRY * most(length, ratio)

    def check_size(self, size: int, length: int, ratio: float) -> None:
        """Fewer than k are allowed, not none: an empty body would look like no body."""
        if size % ENTRY or not ENTRY <= size <= self.bound(length, ratio):
            limit = self.bound(length, ratio)
            raise CodecError(f"a topk body of {length} elements has {size} bytes, expected a multiple of {ENTRY} from {ENTRY} to {limit}")

    def encode(self, source: torch.Tensor, body: torch.Tensor, key: CodecKey, ratio: float) -> int:
        """Refuses (0) a block with inf or NaN."""
        length = source.numel()
        k = most(length, ratio)
        sizes = source.abs()
        if not math.isfinite(float(sizes.amax())):
            return 0
        step = -(-length // SAMPLE)
        sample = sizes[key.clock % step :: step] if step > 1 else sizes
        aim = min(sample.numel(), math.ceil(k * (MARGIN if step > 1 else 1.0) * sample.numel() / length))
        threshold = float(torch.topk(sample, aim, sorted=True).values[-1])
        places = torch.nonzero(sizes >= threshold if threshold else sizes > 0).view(-1)
        if places.numel() > k:
            places = places[torch.topk(sizes[places], k, sorted=False).indices].sort().values
        elif not places.numel():
            places = torch.zeros(1, dtype=torch.int64, device="cpu")
        count = places.numel()
        values = source[places]
        body[: 4 * count].view(torch.int32).copy_(places)
        body[4 * count : 8 * count].view(torch.float32).copy_(values)
        source[places] = 0.0
        return ENTRY * count

    def decode(self, body: torch.Tensor, out: torch.Tensor, key: CodecKey, ratio: float) -> None:
        """Refuses places that do not rise or lie outside the block."""
        self.check_size(body.numel(), out.numel(), ratio)
        count = body.numel() // ENTRY
        places = body[: 4 * count].view(torch.int32).to(torch.int64)
        first, last = int(places[0]), int(places[-1])
        if first < 0 or last >= out.numel() or not bool((places[1:] > places[:-1]).all()):
            raise CodecError(f"a topk body has places that do not rise from 0 to {out.numel() - 1} (first {first}, last {last})")
        out.zero_()
        out[places] = body[4 * count :].view(torch.float32).to(out.dtype)


def most(length: int, ratio: float) -> int:
    """k: how many of `length` elements are sent at `ratio`, one at least."""
    return max(1, min(length, math.ceil(length * ratio)))
