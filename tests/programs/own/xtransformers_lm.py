"""A decoder of x-transformers, with gradients accumulated over two batches and clipped."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

import psjob as ps  # new

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randint(0, 32, (64, 10))), batch_size=4, shuffle=True)
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=Decoder(dim=16, depth=2, heads=2)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(3):
    for number, (batch,) in enumerate(loader, 1):
        loss = model(batch)
        (loss / 2).backward()
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    print("epoch", epoch, "loss", loss.item())
