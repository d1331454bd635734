"""Whole numbers of -127…127 with one float32 scale for each run of 256 elements. 1 1/64 bytes an element.

scale = max|x| / 127 over the run, q = round(x / scale), and x̂ = q · scale, so |x - x̂| ≤ scale / 2. The residual is added to the next
gradient. Sources: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016), for scales of small runs; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019).
"""

from __future__ import annotations

import torch

from psjob.codecs.base import SPAN, CodecError, CodecKey, FixedSize, spans

RUN = 256
LARGEST = 1e38
"""A run with more than this goes as it is: 128 scales must be a float32."""
SMALLEST = 1e-30
"""A run with less than this becomes zeros, which error feedback keeps for later."""


class Int8(FixedSize):
    """Body: the scales of all runs, then one byte an element."""

    name = "int8"
    number = 3
    feeds_back = True

    def bound(self, length: int, ratio: float) -> int:
        """A scale a run, and a byte an element."""
        return 4 * _runs(length) + length

    def encode(self, source: torch.Tensor, body: torch.Tensor, key: CodecKey, ratio: float) -> int:
        """Refuses (0) a block with inf, NaN or a magnitude above LARGEST."""
        length, size = source.numel(), self.bound(source.numel(), ratio)
        scales, numbers = _parts(body[:size], length)
        scratch = torch.empty(min(SPAN, length), dtype=torch.float32, device="cpu")
        for part, at in _rows(source):
            torch.amax(torch.abs(part, out=scratch[: part.numel()].view(part.shape)), 1, out=scales[at])
        if not bool((scales <= LARGEST).all()):  # false of NaN too
            return 0
        scales.masked_fill_(scales < SMALLEST, 0.0).div_(127.0)
        inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
        for (part, at), (whole, _) in zip(_rows(source), _rows(numbers), strict=True):
            near = scratch[: part.numel()].view(part.shape)
            torch.mul(part, inverse[at].unsqueeze(1), out=near)
            whole.copy_(near.round_())
            part.sub_(near.mul_(scales[at].unsqueeze(1)))
        return size

    def decode(self, body: torch.Tensor, out: torch.Tensor, key: CodecKey, ratio: float) -> None:
        """Refuses scales that are negative, not finite or above what `encode` writes."""
        self.check_size(body.numel(), out.numel(), ratio)
        scales, numbers = _parts(body, out.numel())
        if not bool(((scales >= 0) & (scales <= LARGEST / 100)).all()):
            raise CodecError(f"an int8 body has a scale outside 0..{LARGEST / 100:g}, or one that is no number")
        for (part, at), (whole, _) in zip(_rows(out), _rows(numbers), strict=True):
            part.copy_(whole)
            part.mul_(scales[at].unsqueeze(1))


def _runs(length: int) -> int:
    return -(-length // RUN)


def _parts(body: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    head = 4 * _runs(length)
    return body[:head].view(torch.float32), body[head:].view(torch.int8)


def _rows(flat: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
    """Views of `flat` with a run a row, SPAN elements at a time, each with its runs' numbers; the short last run by itself."""
    whole = flat.numel() // RUN * RUN
    rows = [(flat[span].view(-1, RUN), slice(span.start // RUN, span.stop // RUN)) for span in spans(whole)]
    if whole < flat.numel():
        rows.append((flat[whole:].view(1, -1), slice(whole // RUN, whole // RUN + 1)))
    return rows
