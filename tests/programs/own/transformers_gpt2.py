"""A GPT-2 in a plain loop with the schedule of transformers."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup, set_seed

import psjob as ps  # new

set_seed(0)
rows = torch.randint(0, 32, (48, 8))
loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
loader = ps.shard(loader)  # new
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = get_linear_schedule_with_warmup(optimizer, 3, 3 * len(loader))
model, optimizer = ps.attach(model, optimizer, scheduler=scheduler)  # new
for epoch in range(3):
    for (batch,) in loader:
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print("epoch", epoch, "loss", loss.item())
