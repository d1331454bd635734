"""Learns to guess the next character of Python's own standard library. Ordinary PyTorch but for the lines that say `ps`."""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

SYMBOLS = 97
"""Printable ASCII, the end of a line, and one for all else."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each worker")
    parser.add_argument("--look-every", type=int, default=200, help="steps between two looks at unseen text")
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--lr", type=float, default=0.004)
    args = parser.parse_args()

    torch.manual_seed(0)
    seen, unseen = texts()
    seen = seen[torch.randperm(len(seen))[: args.steps * args.batch_size * ps.world()]]
    loader = DataLoader(TensorDataset(seen), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = Characters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step / args.steps))
    model, optimizer = ps.attach(model, optimizer, schedule=schedule)

    for (windows,) in ps.shard(loader):
        loss = loss_of(model, windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ps.report(loss=loss.item(), total=args.steps)
        step = schedule.last_epoch
        if step % args.look_every == 0 or step == args.steps:
            ps.wait()  # in local mode a round that is open ends here: all hold the job's weights
            look(model, unseen, step)


@torch.no_grad()
def look(model: nn.Module, unseen: torch.Tensor, step: int) -> None:
    """Tell how well unseen text is guessed."""
    if ps.is_first():
        guessed = loss_of(model, unseen).item()
        print(f"step {step}, {ps.step()} exchanges: {guessed:.4f} nats a character of unseen text", flush=True)
        ps.report(unseen_loss=guessed)


class Characters(nn.Module):
    """Guesses each character from the 16 before it: an embedding, one convolution, one hidden layer; 97,000 parameters."""

    def __init__(self, reach: int = 16, width: int = 128) -> None:
        super().__init__()
        self.reach = reach
        self.embedding = nn.Embedding(SYMBOLS, 32)
        self.convolution = nn.Conv1d(32, width, reach)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, SYMBOLS)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        earlier = nn.functional.pad(self.embedding(windows).transpose(1, 2), (self.reach - 1, 0))
        found = torch.relu(self.convolution(earlier)).transpose(1, 2)
        return self.out(torch.relu(self.hidden(found)))


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean of -log(probability given to the next character)."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def warm_cosine(part: float) -> float:
    """Factor of the learning rate when that part of all steps is made."""
    return min(1.0, part * 20) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, part)))


def texts(length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of `length` + 1 characters: from nine modules in ten, and 512 from the others."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    seen = symbols(b"".join(path.read_bytes() for number, path in enumerate(modules) if number % 10))
    unseen = symbols(b"".join(path.read_bytes() for path in modules[::10]))
    count = len(unseen) // (length + 1)
    return windows_of(seen, length), windows_of(unseen, length)[:: max(1, count // 512)][:512]


def symbols(text: bytes) -> torch.Tensor:
    """Numbers from 0 to 96."""
    raw = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return torch.where(raw == 10, 95, torch.where((raw >= 32) & (raw < 127), raw - 32, 96))


def windows_of(numbers: torch.Tensor, length: int) -> torch.Tensor:
    count = len(numbers) // (length + 1)
    return numbers[: count * (length + 1)].view(count, length + 1)


if __name__ == "__main__":
    main()
