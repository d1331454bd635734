# arguments: grad vmap
"""Gradients by torch.func in place of backward."""

import sys

import torch
from torch.func import functional_call, grad, grad_and_value, vmap

import psjob as ps

torch.manual_seed(0)
x, y = torch.randn(48, 4), torch.randn(48, 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_of(weights, inputs, targets):
    return torch.nn.functional.mse_loss(functional_call(model, weights, (inputs,)), targets)


for _epoch in ps.epochs(2):
    for inputs, targets in ps.shard(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4, shuffle=True)):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        if sys.argv[1] == "grad":
            found, _ = grad_and_value(loss_of)(weights, inputs, targets)
        else:
            each = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, inputs, targets)
            found = {name: gradients.mean(0) for name, gradients in each.items()}
        for name, p in model.named_parameters():
            p.grad = found[name]
        optimizer.step()
