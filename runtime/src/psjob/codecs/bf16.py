"""bfloat16: the upper half of a float32, rounded to nearest even. 2 bytes an element.

8 bits of mantissa stay, so the relative error is at most 2⁻⁹. The exponent is float32's own, so nothing below 3.39e38 overflows
and inf and NaN stay what they are. Source of the form: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training" (2019).
"""

from __future__ import annotations

import torch

from psjob.codecs.base import CodecKey, FixedSize, spans


class BF16(FixedSize):
    """Rounds each number by itself; what is lost is not fed back."""

    name = "bf16"
    number = 1
    feeds_back = False

    def bound(self, length: int, ratio: float) -> int:
        """2 bytes an element."""
        return 2 * length

    def encode(self, source: torch.Tensor, body: torch.Tensor, key: CodecKey, ratio: float) -> int:
        """Round; never refuses."""
        size = 2 * source.numel()
        body[:size].view(torch.bfloat16).copy_(source)
        return size

    def decode(self, body: torch.Tensor, out: torch.Tensor, key: CodecKey, ratio: float) -> None:
        """Exact: each bfloat16 is a float32."""
        self.check_size(body.numel(), out.numel(), ratio)
        halves = body.view(torch.bfloat16)
        for span in spans(out.numel()):
            out[span].copy_(halves[span])
