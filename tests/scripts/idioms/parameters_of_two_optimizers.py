"""As InfoGAN: an optimizer for each of two models, and a third one for the parameters of both."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(202)
x = torch.randn(48, 3)
models = nn.ModuleDict({"encoder": nn.Linear(3, 2), "decoder": nn.Linear(2, 3)})
encoder, decoder = models["encoder"], models["decoder"]
for_encoder = torch.optim.Adam(encoder.parameters(), lr=1e-2)
for_decoder = torch.optim.Adam(decoder.parameters(), lr=1e-2)
for_both = torch.optim.Adam(models.parameters(), lr=1e-3)
ps.attach(models, (for_encoder, for_decoder, for_both))
for _ in range(2):
    for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
        for optimizer, weight in ((for_encoder, 1.0), (for_decoder, 1.0), (for_both, 0.1)):
            optimizer.zero_grad()
            (weight * nn.functional.mse_loss(decoder(encoder(inputs).tanh()), inputs)).backward()
            optimizer.step()
