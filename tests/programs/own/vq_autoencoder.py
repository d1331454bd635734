"""An autoencoder whose code is quantized by vector-quantize-pytorch, with codes that are learned by gradients."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from vector_quantize_pytorch import FSQ

import psjob as ps  # new

torch.manual_seed(0)
x = torch.tensor(load_digits().data[:160] / 16, dtype=torch.float32)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
encoder, decoder = torch.nn.Linear(64, 4 * 3), torch.nn.Linear(4 * 3, 64)
quantizer = FSQ([5, 5, 5])
model = torch.nn.ModuleDict({"encoder": encoder, "quantizer": quantizer, "decoder": decoder})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        codes, _ = quantizer(encoder(batch).view(-1, 4, 3))
        loss = (decoder(codes.reshape(-1, 12)) - batch).abs().mean()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
