"""Q-learning with a replay buffer and a target network, without a loader."""

import collections
import copy
import random

import torch
from torch import nn

import psjob as ps

torch.manual_seed(105)
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
