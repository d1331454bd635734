"""The floor: what memory itself costs. `--what memcpy` copies the bytes; `--what pass` makes the fused optimizer's own pass over them."""

from __future__ import annotations

import clock
import torch


def main() -> None:
    words = clock.asked(__doc__)
    torch.set_num_threads(1)
    size = words.megabytes * 250_000
    weights, grad = torch.zeros(size), torch.ones(size)
    if words.what == "memcpy":
        clock.answer(clock.cycles(lambda: weights.copy_(grad), words.seconds))
        return
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    weights.requires_grad_()
    weights.grad = grad
    optimizer = kinds[words.optimizer]([weights], lr=1e-3, fused=True)
    clock.answer(clock.cycles(optimizer.step, words.seconds))


if __name__ == "__main__":
    main()
