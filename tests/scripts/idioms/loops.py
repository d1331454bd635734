"""Loops of a script: by epochs and by steps, with and without a loader, with accumulation, and what is done between the steps."""

import collections
import copy
import itertools
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import psjob as ps

torch.manual_seed(0)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% mlp: The loop of every tutorial.
x = torch.randn(60, 10)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5, shuffle=True)
model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(loader)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")


# %% functions: Functions train() and evaluate() under a main guard.
def train(model, loader, optimizer):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    return sum(nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in loader) / max(1, len(loader))


def main():
    x = torch.randn(60, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    model, optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train_loader, test_loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True)), DataLoader(data, batch_size=10)
    for epoch in range(2):
        train(model, train_loader, optimizer)
        print(f"epoch {epoch} loss {evaluate(model, test_loader):.3f}")


if __name__ == "__main__":
    main()


# %% trainer_class: A class Trainer that holds model, optimizer, scheduler and loader.
class Trainer:
    def __init__(self, model, data):
        self.model, self.step = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        ps.attach(self.model, self.optimizer, trainer=self)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def fit(self, epochs):
        for _ in range(epochs):
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.loss(batch).backward()
                self.optimizer.step()
                self.step += 1
            self.scheduler.step()

    def loss(self, batch):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


Trainer(nn.Linear(6, 1), data).fit(3)

# %% while_loop: Training by steps, with an iterator that is made anew where it ends.
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
batches, step = iter(loader), 0
while step < 15:
    try:
        inputs, targets = next(batches)
    except StopIteration:
        batches = iter(loader)
        inputs, targets = next(batches)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    step += 1

# %% cycle: Training by steps, with itertools: the batches of one pass again and again.
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
for inputs, targets in itertools.islice(itertools.cycle(loader), 15):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()

# %% zip_of_two_loaders: Labelled and unlabelled batches side by side.
model, optimizer = ps.attach(model, optimizer)

labelled = ps.shard(DataLoader(TensorDataset(x[:24], x[:24].sum(1, keepdim=True)), batch_size=2, shuffle=True))
unlabelled = ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))
for _ in range(2):
    for (inputs, targets), (more,) in zip(labelled, unlabelled, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets) + 0.1 * (model(more) - model(more * 1.01)).pow(2).mean()
        loss.backward()
        optimizer.step()

# %% sliced_by_hand: A loop without ps.shard: each rank takes its own samples of a list.
x = torch.randn(32, 4)
mine = list(range(ps.rank(), 32, ps.world()))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
for _ in range(3):
    for begin in range(0, len(mine), 4):
        inputs = x[mine[begin : begin + 4]]
        optimizer.zero_grad(set_to_none=False)
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()

# %% looks_at_a_batch: One batch is looked at before training, to find the shape of the first layer.
data = TensorDataset(torch.randn(40, 7), torch.randn(40, 1))
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
inputs, _ = next(iter(loader))
torch.manual_seed(27)
model = nn.Linear(inputs.shape[1], 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
assert next(iter(loader))[0].shape[1] == 7
# and the loop over loader

# %% accumulation_modulo: Gradient accumulation; 25 batches on two workers do not come out even.
x = torch.randn(50, 6)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x[:, :2] * 2), batch_size=2, shuffle=True))
for _ in range(2):
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

# %% accumulation_after: Gradient accumulation; 25 batches on two workers do not come out even.
x = torch.randn(50, 6)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x[:, :2] * 2), batch_size=2, shuffle=True))
for _ in range(2):
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    if (i + 1) % 4:
        optimizer.step()
        optimizer.zero_grad()

# %% accumulation_length: Gradient accumulation; 25 batches on two workers do not come out even.
# as accumulation_modulo
# with `if (i + 1) % 4 == 0 or i + 1 == len(loader):` for `if (i + 1) % 4 == 0:`

# %% several_steps_a_batch: A few optimizer steps on each batch, as PPO makes them.
states, advantages = torch.randn(44, 4), torch.randn(44, 1)
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
policy, optimizer = ps.attach(policy, optimizer)
for _ in range(2):
    for state, advantage in ps.shard(DataLoader(TensorDataset(states, advantages), batch_size=4, shuffle=True)):
        old = policy(state).log_softmax(-1)[:, :1].detach()
        for _update in range(3):
            ratio = (policy(state).log_softmax(-1)[:, :1] - old).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

# %% two_backwards: Two losses with a backward pass each before one step.
model, optimizer = ps.attach(model, optimizer)
for inputs, targets in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    out = model(inputs)
    nn.functional.mse_loss(out, targets).backward(retain_graph=True)
    (0.1 * out.abs().mean()).backward()
    optimizer.step()


# %% two_losses: Two heads, two losses, two calls of backward, one step.
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value, self.kind = nn.Linear(6, 12), nn.Linear(12, 1), nn.Linear(12, 3)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.value(h), self.kind(h)


data = TensorDataset(x, x.sum(1, keepdim=True), torch.randint(0, 3, (48,)))
model = Heads()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, value, kind in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        predicted, logits = model(inputs)
        nn.functional.mse_loss(predicted, value).backward(retain_graph=True)
        nn.functional.cross_entropy(logits, kind).backward()
        optimizer.step()

# %% checkpointing: Activations are computed again in the backward pass.
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
# and the loop
# with `torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False)` for `model(inputs)`

# %% gradient_penalty: A penalty on the gradient by the input.
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        inputs.requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        (nn.functional.mse_loss(out, targets) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        optimizer.step()

# %% reinforce: A policy gradient on a bandit: no loader, the data are what the policy does.
policy = nn.Linear(1, 4)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
policy, optimizer = ps.attach(policy, optimizer)
generator = torch.Generator().manual_seed(100 + ps.rank())
pays = torch.tensor([0.1, 0.2, 0.9, 0.3])
for _ in range(12):
    logits = policy(torch.ones(16, 1))
    arms = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    rewards = (torch.rand(16, generator=generator) < pays[arms]).float()
    loss = -(logits.log_softmax(-1)[torch.arange(16), arms] * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% replay_buffer: Q-learning with a replay buffer and a target network, without a loader.
random.seed(ps.rank())
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
target, buffer = copy.deepcopy(model), collections.deque(maxlen=100)
state = torch.zeros(2)
for step in range(40):
    action = random.randrange(2)
    after = state + (torch.tensor([0.1, 0.0]) if action else torch.tensor([0.0, -0.1]))
    buffer.append((state, action, float(after.sum()), after))
    state = after if after.abs().max() < 1 else torch.zeros(2)
    if len(buffer) < 8:
        continue
    now, actions, rewards, then = zip(*random.sample(list(buffer), 8), strict=True)
    with torch.no_grad():
        wanted = torch.tensor(rewards) + 0.9 * target(torch.stack(then)).max(1).values
    found = model(torch.stack(now)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
    optimizer.zero_grad()
    nn.functional.smooth_l1_loss(found, wanted).backward()
    optimizer.step()
    if step % 5 == 0:
        target.load_state_dict(model.state_dict())


# %% rnn_hidden_state: A hidden state that continues from batch to batch, cut off by detach.
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, hidden):
        y, hidden = self.rnn(x, hidden)
        return self.out(y), tuple(h.detach() for h in hidden)


series = torch.randn(32, 6, 3)
model = Net()
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
hidden = None
for (batch,) in ps.shard(DataLoader(TensorDataset(series), batch_size=4)):
    out, hidden = model(batch[:, :-1], hidden)
    optimizer.zero_grad()
    nn.functional.mse_loss(out, batch[:, 1:]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()

# %% early_stopping: Early stopping on a held-out loss that every rank computes alike.
known, held = TensorDataset(x[:32], x[:32].sum(1, keepdim=True)), (x[32:], x[32:].sum(1, keepdim=True))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.2))
best, patience = float("inf"), 2
for _epoch in range(30):
    for inputs, targets in ps.shard(DataLoader(known, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(held[0]), held[1]).item()
    if loss < best - 1e-4:
        best, patience = loss, 2
    else:
        patience -= 1
    if not patience:
        break

# %% rank0_evaluates_and_saves: Evaluation and saving only on rank 0, each epoch.
data, held = TensorDataset(x[:40], x[:40].sum(1, keepdim=True)), DataLoader(TensorDataset(x[40:], x[40:].sum(1, keepdim=True)))
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.05))
# and the loop
# before each epoch:
model.train()
# after each epoch:
if ps.is_first():
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in held) / len(held)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, f"epoch{epoch}.pt")
    print(f"epoch {epoch} loss {loss:.3f}")

# %% resumes_by_itself: The script loads its own checkpoint where there is one, and saves one at each epoch.
if Path("own.pt").exists():
    model.load_state_dict(torch.load("own.pt"))
model, optimizer = ps.attach(model, optimizer)
# and the loop
# after each epoch:
if ps.is_first():
    torch.save(model.state_dict(), "own.pt")

# %% saves_the_whole_model: torch.save of the model itself, and of a copy of it.
model, optimizer = ps.attach(model, optimizer)
# and the loop
# at the end:
if ps.is_first():
    torch.save(model, "model.pt")
    again = torch.load("model.pt", weights_only=False)
    assert torch.equal(again(x), model(x)) and torch.equal(copy.deepcopy(model)(x), model(x))

# %% kfold: Cross-validation: a model for each fold, all attached by name before the first one is run.
folds = []
for fold in range(2):
    model = nn.Linear(6, 1)
    folds.append(ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), name=f"fold{fold}"))
for fold, (model, optimizer) in enumerate(folds):
    held = range(fold * 20, fold * 20 + 20)
    for inputs, targets in ps.shard(DataLoader(Subset(data, [i for i in range(48) if i not in held]), batch_size=4)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

# %% kfold_in_one_process: Cross-validation: a new model for each fold in one process.
for fold in range(2):
    held = range(fold * 20, fold * 20 + 20)
    model = nn.Linear(6, 1)
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, targets in ps.shard(DataLoader(Subset(data, [i for i in range(48) if i not in held]), batch_size=4)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
