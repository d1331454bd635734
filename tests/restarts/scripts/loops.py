"""Scripts with a loop over `ps.epochs` that keep in `ps.state` what they carry (see `tests.scripts.cells`)."""

import copy
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset, WeightedRandomSampler

import psjob as ps

# %% average: An average of the weights (EMA), which is evaluated.
torch.manual_seed(5)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
state = ps.state(average=average, tails=0)
for epoch in ps.epochs(6):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        average.update_parameters(model)
    with torch.no_grad():
        loss = nn.functional.mse_loss(average(x), y).item()
    state.tails += 1
    if ps.is_first():
        print(f"line epoch {epoch}: {loss:.6f} after {int(average.n_averaged)}")
if ps.is_first():
    print("line tails", state.tails, "of 6")


# %% by_step: A trainer by step, as minGPT's: an iterator that begins again, an evaluation every eight steps, a cosine schedule by hand.
class Trainer:
    """Steps and calls back."""

    def __init__(self, model: nn.Module, data: TensorDataset) -> None:
        self.model, self.optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        self.loader = ps.shard(DataLoader(data, batch_size=8, sampler=RandomSampler(data)))
        self.state = ps.state(tails=0, losses=[])

    def endless(self):
        """Batches of one pass after the other."""
        while True:
            yield from self.loader

    def run(self, parts: int, steps: int) -> None:
        """Train."""
        batches = self.endless()
        for part in ps.epochs(parts):
            self.model.train()
            for number in range(part * steps, part * steps + steps):
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.02 * (1 + math.cos(math.pi * number / (parts * steps))) / 2
                inputs, targets = next(batches)
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                loss.backward()
                self.optimizer.step()
                self.state.losses.append(loss.item())
            self.evaluate(part)

    @torch.no_grad()
    def evaluate(self, part: int) -> None:
        """Say how it goes."""
        self.model.eval()
        self.state.tails += 1
        if ps.is_first():
            print(f"line part {part}: {nn.functional.mse_loss(self.model(x), y).item():.6f} after {len(self.state.losses)}")


torch.manual_seed(16)
x = torch.randn(48, 4)
y = x.sum(1, keepdim=True)
trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)), TensorDataset(x, y))
trainer.run(3, 8)
if ps.is_first():
    print("line tails", trainer.state.tails, "of 3; mean", round(sum(trainer.state.losses) / 24, 6))


# %% contrast: Contrastive learning: a queue of keys in buffers, a second encoder that follows by momentum, augmentation by random numbers.
class Pairs(Dataset):
    """Two views of each sample."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.x[index] + 0.1 * random.random(), self.x[index] + 0.1 * torch.from_numpy(np.random.randn(6)).float()
        return one, other


class Contrast(nn.Module):
    """The encoder, the one that follows it, and the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(16, 4), dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query = nn.functional.normalize(self.encoder(one), dim=1)
        with torch.no_grad():
            for mine, ours in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
                mine.lerp_(ours, 0.1)
            keys = nn.functional.normalize(self.follower(other), dim=1)
        scores = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.T.clone()], 1) / 0.2
        with torch.no_grad():
            self.queue[int(self.at) : int(self.at) + len(keys)] = keys
            self.at.copy_((self.at + len(keys)) % 16)
        return nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


torch.manual_seed(18)
random.seed(18)
np.random.seed(18)
model = Contrast()
model, optimizer = ps.attach(model, torch.optim.SGD(model.encoder.parameters(), lr=0.1), follower=model.follower)
state = ps.state(tails=0, mean=0.0)
loader = ps.shard(DataLoader(Pairs(torch.randn(64, 6)), batch_size=8, shuffle=True))
for epoch in ps.epochs(6):
    for one, other in loader:
        optimizer.zero_grad()
        loss = model(one, other)
        loss.backward()
        optimizer.step()
        state.mean += (loss.item() - state.mean) / 4
    state.tails += 1
    if ps.is_first():
        print(f"line epoch {epoch}: {state.mean:.6f} at {int(model.at)} {model.queue.sum().item():.6f}")
if ps.is_first():
    print("line tails", state.tails, "of 6")

# %% curriculum: A curriculum: harder data and longer batches from epoch to epoch, sampled by weights that the losses change.
torch.manual_seed(22)
x = torch.randn(96, 4)
y = x.prod(1, keepdim=True)
hard = x.abs().sum(1).argsort()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True))
state = ps.state(weights=torch.ones(96), sizes=[], tails=0)
for epoch in ps.epochs(6):
    size = 24 + 14 * epoch
    taken = hard[:size]
    sampler = WeightedRandomSampler(state.weights[taken].tolist(), 64)
    model.train()
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x[taken], y[taken]), batch_size=8, sampler=sampler)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = (model(x) - y).pow(2).squeeze(1)
    state.weights.copy_(0.1 + losses)
    state.sizes.append(size)
    state.tails += 1
    if ps.is_first():
        print(f"line epoch {epoch}: {losses.mean().item():.6f} {state.weights.sum().item():.5f} {state.sizes}")
if ps.is_first():
    print("line tails", state.tails, "of 6")

# %% early_stopping: A CNN with BatchNorm, an evaluation after each epoch, a schedule and early stopping.
torch.manual_seed(0)
x = torch.randn(96, 1, 6, 6)
y = (x.mean((1, 2, 3)) > 0).long()
train, held = TensorDataset(x[:64], y[:64]), (x[64:], y[64:])
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
state = ps.state(best=0.0, bad=0, history=[], schedule=schedule, tails=0)
loader = ps.shard(DataLoader(train, batch_size=8, shuffle=True))
for epoch in ps.epochs(9):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    state.schedule.step()
    state.tails += 1
    model.eval()
    with torch.no_grad():
        accuracy = (model(held[0]).argmax(1) == held[1]).float().mean().item()
    state.history.append(round(accuracy, 4))
    state.bad = 0 if accuracy > state.best else state.bad + 1
    state.best = max(state.best, accuracy)
    if ps.is_first():
        print(f"line epoch {epoch}: {accuracy:.4f} best {state.best:.4f} bad {state.bad} lr {optimizer.param_groups[0]['lr']:.5f}")
    if state.bad == 6:
        break
if ps.is_first():
    print("line tails", state.tails, "of", epoch + 1, state.history)

# %% folds: Three folds one after the other, each with a model of its own, and their mean score.
torch.manual_seed(11)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True)
data = TensorDataset(x, y)
folds = [
    ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), name=f"fold{number}")
    for number, model in enumerate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(3))
]
state = ps.state(scores={}, tails=0)
for number, (model, optimizer) in enumerate(folds):
    held = range(number * 32, number * 32 + 32)
    loader = ps.shard(DataLoader(Subset(data, [i for i in range(96) if i not in held]), batch_size=8, shuffle=True))
    for epoch in ps.epochs(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x[held.start : held.stop]), y[held.start : held.stop]).item()
        state.tails += 1
        state.scores.setdefault(number, []).append(round(loss, 6))
        if ps.is_first():
            print(f"line fold {number} epoch {epoch}: {state.scores}")
if ps.is_first():
    print("line tails", state.tails, "of 6; mean", round(sum(scores[-1] for scores in state.scores.values()) / 3, 6))

# %% gan: A GAN: two models and optimizers, noise of its own, and losses averaged over a pass.
torch.manual_seed(14)
data = torch.randn(64, 2) * 0.3 + 1
generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
generator, for_generator = ps.attach(generator, torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.99)), name="generator")
critic, for_critic = ps.attach(critic, torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.99)), name="critic")
state = ps.state(noise=torch.zeros(()), losses=[], tails=0)
loss = nn.BCEWithLogitsLoss()
fixed = torch.randn(16, 4)
for epoch in ps.epochs(4):
    total = 0.0
    generator.train()
    for (real,) in ps.shard(DataLoader(TensorDataset(data), batch_size=8, shuffle=True)):
        fake = generator(torch.randn(8, 4))
        for_critic.zero_grad()
        (loss(critic(real), torch.ones(8, 1)) + loss(critic(fake.detach()), torch.zeros(8, 1))).backward()
        for_critic.step()
        for_generator.zero_grad()
        fooled = loss(critic(fake), torch.ones(8, 1))
        fooled.backward()
        for_generator.step()
        total += fooled.item()
    generator.eval()
    state.tails += 1
    state.noise += total
    state.losses.append(round(total / 4, 5))
    if ps.is_first():
        with torch.no_grad():
            print(f"line epoch {epoch}: {state.losses} {generator(fixed).mean().item():.6f} {state.noise.item():.5f}")
if ps.is_first():
    print("line tails", state.tails, "of 4")


# %% metrics: A metrics object of each pass, and one of all passes; a rate that warms up by step; accumulated gradients; clipping.
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

# %% patience: A `while` loop with patience, whose best weights are kept in memory and put back at the end.
torch.manual_seed(13)
x = torch.randn(96, 5)
y = (x @ torch.randn(5, 1)).tanh()
model = nn.Sequential(nn.Linear(5, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 1))
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.04))
state = ps.state(best=float("inf"), patience=3, weights={}, tails=0)
loader = ps.shard(DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True))
epochs = iter(ps.epochs(12))
while state.patience > 0 and (epoch := next(epochs, None)) is not None:
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x[64:]), y[64:]).item()
    state.tails += 1
    if loss < state.best - 0.02 or epoch < 4:
        state.best, state.patience = loss, 3
        state.weights = copy.deepcopy(model.state_dict())
    else:
        state.patience -= 1
    if ps.is_first():
        print(f"line epoch {epoch}: {loss:.6f} best {state.best:.6f} patience {state.patience}")
if ps.is_first():
    best = sum(float(value.double().sum()) for value in state.weights.values())
    print(f"line tails {state.tails} of {epoch + 1}; best {state.best:.6f}, sum {best:.6f}")


# %% phases: Two phases: pretraining on one loader, then fine-tuning on others by the number of the epoch, `while` with patience.
class Meter:
    """A mean of the script's own."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """One more."""
        self.total, self.count = self.total + value, self.count + 1

    def state_dict(self) -> dict[str, float]:
        """Both numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Back."""
        vars(self).update(state)


def main() -> None:
    """Train."""
    torch.manual_seed(7)
    x = torch.randn(96, 4)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    meter = Meter()
    state = ps.state(meter=meter, patience=3, best=float("inf"), tails=0)
    first = ps.shard(DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True))
    for epoch in ps.epochs(2):
        for inputs, targets in first:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            meter.add(loss.item())
        if ps.is_first():
            print(f"line pretrained {epoch}: {meter.total / meter.count:.6f} of {meter.count}")
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    for epoch in ps.epochs():
        size = 8 if epoch % 2 else 16
        for inputs, targets in ps.shard(DataLoader(TensorDataset(x[32:], y[32:]), batch_size=size, shuffle=True)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        error = nn.functional.mse_loss(model(x), y).item()
        state.tails += 1
        state.patience -= error > state.best - 0.05
        state.best = min(state.best, error)
        if ps.is_first():
            print(f"line tuned {epoch}: {error:.6f} best {state.best:.6f} patience {state.patience}")
        if state.patience == 0:
            break
    if ps.is_first():
        print("line tails", state.tails, "of", epoch + 1)


main()

# %% plateau: ReduceLROnPlateau on a validation loss, the best model saved by torch.save, a sum over all epochs.
torch.manual_seed(3)
x = torch.randn(96, 5)
y = x.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
model, optimizer = ps.attach(model, optimizer, plateau=plateau)
state = ps.state(best=float("inf"), saved=-1, seen=0, tails=0)
loader = ps.shard(DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True))
for epoch in ps.epochs(7):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        state.seen += len(inputs)
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x[64:]), y[64:]).item()
    plateau.step(loss)
    state.tails += 1
    if loss < state.best:
        state.best, state.saved = loss, epoch
        if ps.is_first():
            torch.save(model.state_dict(), "best.pt")
    if ps.is_first():
        print(
            f"line epoch {epoch}: {loss:.5f} best {state.best:.5f} of {state.saved} seen {state.seen} lr {optimizer.param_groups[0]['lr']}"
        )
if ps.is_first():
    print("line tails", state.tails, "of 7", state.saved, round(sum(p.abs().sum().item() for p in torch.load("best.pt").values()), 3))

# %% recurrent: A hidden state that goes from batch to batch and from epoch to epoch, and a perplexity.
torch.manual_seed(15)
tokens = torch.randint(0, 9, (64, 7))
embedding, rnn, out = nn.Embedding(9, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 9)
model = nn.ModuleDict({"embedding": embedding, "rnn": rnn, "out": out})
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))
state = ps.state(hidden=torch.zeros(1, 8, 8), tails=0, best=float("inf"))
for epoch in ps.epochs(6):
    total = 0.0
    for (batch,) in ps.shard(DataLoader(TensorDataset(tokens), batch_size=8, drop_last=True)):
        optimizer.zero_grad()
        found, hidden = model["rnn"](model["embedding"](batch[:, :-1]), state.hidden)
        loss = nn.functional.cross_entropy(model["out"](found).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        state.hidden = hidden.detach()
        total += loss.item()
    state.tails += 1
    if total < state.best:
        state.best = total
    else:
        for group in optimizer.param_groups:
            group["lr"] /= 4
    if ps.is_first():
        print(f"line epoch {epoch}: {math.exp(total / 4):.6f} {state.hidden.sum().item():.6f} lr {optimizer.param_groups[0]['lr']}")
if ps.is_first():
    print("line tails", state.tails, "of 6")

# %% replay: Q-learning: experience is played by the model itself and kept, a target network follows by copies, no loader.
torch.manual_seed(23)
random.seed(23 + ps.rank())
model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 2))
target = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 2))
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
target.load_state_dict(model.state_dict())
state = ps.state(buffer=[], at=torch.zeros(2), target=target, rewards=0.0, tails=0)
for episode in ps.epochs(6):
    for _ in range(4):
        for _ in range(6):
            with torch.no_grad():
                action = int(model(state.at).argmax()) if random.random() > 0.3 else random.randrange(2)
            after = state.at + (torch.tensor([0.3, 0.1]) if action else torch.tensor([-0.1, -0.3]))
            reward = float(after.sum() - state.at.sum())
            state.buffer.append((state.at.tolist(), action, reward, after.tolist()))
            state.rewards += reward
            state.at = after if after.abs().max() < 1 else torch.zeros(2)
        now, actions, rewards, then = zip(*random.sample(state.buffer, 6), strict=True)
        with torch.no_grad():
            wanted = torch.tensor(rewards) + 0.9 * target(torch.tensor(then)).max(1).values
        found = model(torch.tensor(now)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(found, wanted).backward()
        optimizer.step()
    del state.buffer[:-60]
    target.load_state_dict(model.state_dict())
    state.tails += 1
    if ps.is_first():
        print(f"line episode {episode}: {state.rewards:.5f} {len(state.buffer)} {sum(p.sum().item() for p in target.parameters()):.6f}")
if ps.is_first():
    print("line tails", state.tails, "of 6")

# %% saves: Files of the script's own: a snapshot each epoch, the newest two are kept, and a history as JSON that is written anew.
torch.manual_seed(17)
x = torch.randn(64, 4)
y = x.prod(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ELU(), nn.Linear(8, 1))
model, optimizer = ps.attach(model, torch.optim.RMSprop(model.parameters(), lr=0.01))
state = ps.state(history=[], tails=0)
folder = Path("snapshots")
for epoch in ps.epochs(6):
    model.train()
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    state.tails += 1
    state.history.append({"epoch": epoch, "loss": loss.item()})
    if ps.is_first():
        folder.mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), "epoch": epoch}, folder / f"{epoch}.pt")
        for old in folder.glob("*.pt"):
            if int(old.stem) < epoch - 1:
                old.unlink()
        Path("history.json").write_text(json.dumps(state.history))
        print(f"line epoch {epoch}: {len(state.history)} {state.history[-1]['loss']:.6f}")
if ps.is_first():
    kept = sorted(int(path.stem) for path in folder.glob("*.pt"))
    newest = torch.load(folder / f"{kept[-1]}.pt")
    told = json.loads(Path("history.json").read_text())
    print("line kept", kept, round(sum(float(value.double().sum()) for value in newest["model"].values()), 6))
    print("line tails", len(told), "of 6;", [entry["epoch"] for entry in told])


# %% snapshot: The trainer of torch's tutorial on fault tolerance: its snapshot says where it was, and then `ps.epochs`.
class Trainer:
    """Trains, and saves a snapshot now and then."""

    def __init__(self, model: nn.Module, data: DataLoader, optimizer: torch.optim.Optimizer, save_every: int, path: str) -> None:
        self.model, self.data, self.save_every, self.path = model, data, save_every, path
        self.epochs_run = 0
        if os.path.exists(path):
            self.load_snapshot(path)
        self.model, self.optimizer = ps.attach(self.model, optimizer)
        self.state = ps.state(tails=0)

    def load_snapshot(self, path: str) -> None:
        """Go on."""
        snapshot = torch.load(path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def run_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """A step."""
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()

    def run_epoch(self) -> None:
        """A pass."""
        for inputs, targets in self.data:
            self.run_batch(inputs, targets)

    def train(self, max_epochs: int) -> None:
        """All."""
        for epoch in ps.epochs(max_epochs):
            self.run_epoch()
            self.state.tails += 1
            if ps.is_first():
                print(f"line epoch {epoch}: {sum(float(p.detach().sum()) for p in self.model.parameters()):.6f}")
                if epoch % self.save_every == 0:
                    torch.save({"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch + 1}, self.path)
        if ps.is_first():
            print("line tails", self.state.tails, "of", max_epochs)


torch.manual_seed(24)
x = torch.randn(64, 4)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.05), 2, "snapshot.pt").train(6)

# %% unfreezes: A backbone that is trained from the third epoch on.
torch.manual_seed(6)
x = torch.randn(64, 4)
y = x.prod(1, keepdim=True)
backbone, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
backbone.requires_grad_(False)
model = nn.Sequential(backbone, head)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer, later=[backbone])
state = ps.state(losses={}, tails=0)
for epoch in ps.epochs(6):
    if epoch == 2:
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": list(backbone.parameters()), "lr": 0.02})
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    state.tails += 1
    state.losses[epoch] = round(nn.functional.mse_loss(model(x), y).item(), 6)
    if ps.is_first():
        print(f"line epoch {epoch}: {state.losses[epoch]} {len(optimizer.param_groups)} groups")
if ps.is_first():
    print("line tails", state.tails, "of 6", state.losses)
