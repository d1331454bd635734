"""A teacher in eval mode beside the student."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(11)
teacher = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 4)).eval().requires_grad_(False)
student = nn.Linear(5, 4)
optimizer = torch.optim.NAdam(student.parameters(), lr=1e-2)
student, optimizer = ps.attach(student, optimizer)
loader = ps.shard(DataLoader(TensorDataset(torch.randn(50, 5)), batch_size=5, shuffle=True))
for _ in range(2):
    for (x,) in loader:
        with torch.no_grad():
            wanted = teacher(x).log_softmax(-1)
        loss = nn.functional.kl_div(student(x).log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
