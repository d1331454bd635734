"""The same with a codebook that is an average of what each worker saw: it is a buffer, and no gradient trains it."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from vector_quantize_pytorch import VectorQuantize

import psjob as ps  # new

torch.manual_seed(0)
x = torch.tensor(load_digits().data[:160] / 16, dtype=torch.float32)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
encoder, decoder = torch.nn.Linear(64, 4 * 6), torch.nn.Linear(4 * 6, 64)
quantizer = VectorQuantize(dim=6, codebook_size=16, decay=0.8, sync_codebook=False)
model = torch.nn.ModuleDict({"encoder": encoder, "quantizer": quantizer, "decoder": decoder})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        codes, _, commitment = quantizer(encoder(batch).view(-1, 4, 6))
        loss = (decoder(codes.reshape(-1, 24)) - batch).abs().mean() + commitment.sum()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
