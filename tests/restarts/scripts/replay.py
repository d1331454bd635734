"""Q-learning: experience is played by the model itself and kept, a target network follows by copies, no loader."""

import random

import torch
from torch import nn

import psjob as ps

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
