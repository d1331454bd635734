"""A second model without a name."""

import torch
from torch import nn

import psjob as ps

one, other = nn.Linear(2, 1), nn.Linear(2, 1)
one, first = ps.attach(one, torch.optim.SGD(one.parameters(), lr=0.1))
other, second = ps.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))
