"""FBGEMM's CPU table-batched embedding, unpooled: the forward gathers the rows, the backward makes the fused row-wise Adagrad."""

from __future__ import annotations

import itertools
from typing import Any

import clock
import rows
import torch


def main() -> None:
    words = clock.asked(__doc__)
    torch.set_num_threads(1)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

    table: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows.TABLE, rows.WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=rows.RATE,
        eps=rows.EPS,
        pooling_mode=PoolingMode.NONE,
    )
    (weights,) = table.split_embedding_weights()
    weights.zero_()
    grad, offsets = rows.gradient(), torch.arange(rows.UNIQUE + 1)
    turns = itertools.cycle(rows.batches())

    def cycle() -> None:
        table(next(turns), offsets).backward(grad)

    first = rows.batches()[0]
    cycle()
    wanted = -rows.RATE * grad / (grad.pow(2).mean(1, keepdim=True).sqrt() + rows.EPS)
    if not torch.allclose(weights[first], wanted, rtol=1e-3, atol=1e-6):
        raise RuntimeError("FBGEMM's first update is not row-wise Adagrad's")
    clock.answer(clock.cycles(cycle, words.seconds))


if __name__ == "__main__":
    main()
