"""A metrics object of each pass, and one of all passes; a rate that warms up by step; accumulated gradients; clipping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


class Confusion(nn.Module):
    """Counts of predictions by class, as metrics of libraries hold them: in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(3, 3, dtype=torch.long))

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch."""
        self.counts.index_put_((labels, scores.argmax(1)), torch.ones_like(labels), accumulate=True)

    def compute(self) -> float:
        """The share of right ones."""
        return (self.counts.diagonal().sum() / self.counts.sum()).item()

    def reset(self) -> None:
        """Begin anew."""
        self.counts.zero_()


torch.manual_seed(12)
x = torch.randn(96, 5)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
model, optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=0.03))
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
in_pass, overall = Confusion(), Confusion()
state = ps.state(warmup=warmup, in_pass=in_pass, overall=overall, tails=0)
loader = ps.shard(DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True))
for epoch in ps.epochs(6):
    model.train()
    for number, (inputs, targets) in enumerate(loader, 1):
        scores = model(inputs)
        (nn.functional.cross_entropy(scores, targets) / 2).backward()
        in_pass.update(scores, targets)
        overall.update(scores, targets)
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
    model.eval()
    state.tails += 1
    if ps.is_first():
        rate, seen = warmup.get_last_lr()[0], int(overall.counts.sum())
        print(f"line epoch {epoch}: {in_pass.compute():.5f} {overall.compute():.5f} of {seen} lr {rate:.5f}")
    in_pass.reset()
if ps.is_first():
    print("line tails", state.tails, "of 6")
