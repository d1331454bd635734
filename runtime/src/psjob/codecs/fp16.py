"""float16 with one power of two for the block: a float32 scale, then 2 bytes an element.

The scale brings the block's largest magnitude to 2¹⁴…2¹⁵, so nothing becomes inf however large it is, and small gradients keep their bits
down to 2⁻³⁸ of the largest. Multiplying by a power of two rounds nothing; the relative error is 2⁻¹¹ for all that lie within
2⁻²⁹ of the largest. Source: Micikevicius et al., "Mixed Precision Training" (2018), whose loss scale this is, a block at a time.
"""

from __future__ import annotations

import math

import torch

from psjob.codecs.base import CodecError, CodecKey, FixedSize, largest, spans

TOP = 15
"""Magnitudes are brought below 2 to this; float16 ends at 65504, just below 2¹⁶."""
REACH = 112
"""Exponents of the scale, either way: its inverse is a float32 too."""


class FP16(FixedSize):
    """Scales the block, then rounds each number by itself; what is lost is not fed back."""

    name = "fp16"
    number = 2
    feeds_back = False

    def bound(self, length: int, ratio: float) -> int:
        """The scale, and 2 bytes an element."""
        return 4 + 2 * length

    def encode(self, source: torch.Tensor, body: torch.Tensor, key: CodecKey, ratio: float) -> int:
        """Refuses (0) a block with inf or NaN, or with more than 2¹²⁷."""
        top = largest(source)
        exponent = math.frexp(top)[1] - TOP if math.isfinite(top) else REACH + 1
        if exponent > REACH:
            return 0
        scale = math.ldexp(1.0, max(exponent, -REACH)) if top else 1.0
        size = 4 + 2 * source.numel()
        body[:4].view(torch.float32)[0] = scale
        halves = body[4:size].view(torch.float16)
        for span in spans(source.numel()):
            halves[span].copy_(source[span] * (1.0 / scale))
        return size

    def decode(self, body: torch.Tensor, out: torch.Tensor, key: CodecKey, ratio: float) -> None:
        """Refuses a scale that is no power of two within reach."""
        self.check_size(body.numel(), out.numel(), ratio)
        scale = float(body[:4].view(torch.float32)[0])
        if not (math.isfinite(scale) and 2.0**-REACH <= scale <= 2.0**REACH and math.frexp(scale)[0] == 0.5):
            raise CodecError(f"an fp16 body has scale {scale}, expected a power of two from 2^-{REACH} to 2^{REACH}")
        halves = body[4:].view(torch.float16)
        for span in spans(out.numel()):
            out[span].copy_(halves[span]).mul_(scale)
