"""A class Trainer that holds model, optimizer, scheduler and loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(102)


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


x = torch.randn(48, 6)
Trainer(nn.Linear(6, 1), TensorDataset(x, x.sum(1, keepdim=True))).fit(3)
