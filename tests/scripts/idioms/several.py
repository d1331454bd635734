"""Several models, several optimizers, and phases that train one after the other."""

import itertools
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(0)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% gan: A GAN: two models, two optimizers, a step of each a batch.
data = torch.randn(48, 2) * 0.3 + 1
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
for_critic = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.999))
generator, for_generator = ps.attach(generator, for_generator, name="generator")
critic, for_critic = ps.attach(critic, for_critic, name="critic")
noise = torch.Generator().manual_seed(ps.rank())
loss = nn.BCEWithLogitsLoss()
for _ in range(3):
    for (real,) in ps.shard(DataLoader(TensorDataset(data), batch_size=4, shuffle=True)):
        fake = generator(torch.randn(4, 4, generator=noise))
        for_critic.zero_grad()
        (loss(critic(real), torch.ones(4, 1)) + loss(critic(fake.detach()), torch.zeros(4, 1))).backward()
        for_critic.step()
        for_generator.zero_grad()
        loss(critic(fake), torch.ones(4, 1)).backward()
        for_generator.step()

# %% wgan_clips_weights: A Wasserstein GAN: the critic's weights are clipped after each of its steps by RMSprop.
data = torch.randn(48, 2) * 0.3 + 1
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
for_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
for_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
generator, for_generator = ps.attach(generator, for_generator, name="generator")
critic, for_critic = ps.attach(critic, for_critic, name="critic")
noise = torch.Generator().manual_seed(ps.rank())
for i, (real,) in enumerate(ps.shard(DataLoader(TensorDataset(data), batch_size=4, shuffle=True))):
    fake = generator(torch.randn(4, 4, generator=noise))
    for_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(real).mean()).backward()
    for_critic.step()
    for p in critic.parameters():
        p.data.clamp_(-0.1, 0.1)
    if i % 2 == 1:
        for_generator.zero_grad()
        (-critic(fake).mean()).backward()
        for_generator.step()

# %% one_optimizer_of_two_models: An actor and a critic that one optimizer trains.
x = torch.randn(48, 4)
actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
_, optimizer = ps.attach(nn.ModuleList([actor, critic]), optimizer)
for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    (critic(torch.cat([inputs, actor(inputs)], 1)) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()

# %% one_of_two_models_attached: An actor and a critic that one optimizer trains, of which one is attached.
# as one_optimizer_of_two_models
# with `actor, optimizer = ps.attach(actor, optimizer)` for `_, optimizer = ps.attach(nn.ModuleList([actor, critic]), optimizer)`

# %% two_models_unnamed: A second model without a name.
one, other = nn.Linear(2, 1), nn.Linear(2, 1)
one, first = ps.attach(one, torch.optim.SGD(one.parameters(), lr=0.1))
other, second = ps.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))

# %% two_optimizers_worker_side: Two models with an optimizer that has no rule on the shards, one stepped twice as often.
x = torch.randn(48, 4)
body, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
slow, fast = torch.optim.RMSprop(body.parameters(), lr=1e-3), torch.optim.RMSprop(head.parameters(), lr=5e-3)
body, slow = ps.attach(body, slow, name="body")
head, fast = ps.attach(head, fast, name="head")
for _ in range(2):
    for i, (inputs, targets) in enumerate(ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))):
        fast.zero_grad()
        nn.functional.mse_loss(head(body(inputs)), targets).backward()
        fast.step()
        if i % 2:
            slow.step()
            slow.zero_grad()

# %% parameters_of_two_optimizers: As InfoGAN: an optimizer for each of two models, and a third one for the parameters of both.
x = torch.randn(48, 3)
models = nn.ModuleDict({"encoder": nn.Linear(3, 2), "decoder": nn.Linear(2, 3)})
encoder, decoder = models["encoder"], models["decoder"]
for_encoder = torch.optim.Adam(encoder.parameters(), lr=1e-2)
for_decoder = torch.optim.Adam(decoder.parameters(), lr=1e-2)
for_both = torch.optim.Adam(models.parameters(), lr=1e-3)
ps.attach(models, (for_encoder, for_decoder, for_both))
for _ in range(2):
    for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
        for optimizer, weight in ((for_encoder, 1.0), (for_decoder, 1.0), (for_both, 0.1)):
            optimizer.zero_grad()
            (weight * nn.functional.mse_loss(decoder(encoder(inputs).tanh()), inputs)).backward()
            optimizer.step()

# %% two_classes_of_optimizer: Matrices by one optimizer and all else by another, as with Muon and AdamW; each clips its own.
x = torch.randn(48, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim < 2]
optimizers = (torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=True), torch.optim.AdamW(others, lr=3e-3))
model, optimizers = ps.attach(model, optimizers)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(matrices, 0.5)
        nn.utils.clip_grad_norm_(others, 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

# %% clips_two_classes_together: Muon for matrices and AdamW for all else, with one norm over the whole model.
x = torch.randn(42, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02, ns_steps=3)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=3e-3)
model, (muon, adamw) = ps.attach(model, (muon, adamw))
loader = ps.shard(DataLoader(TensorDataset(x, 4 * x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
for _ in range(2):
    for inputs, targets in loader:
        muon.zero_grad()
        adamw.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        muon.step()
        adamw.step()


# %% clips_each_of_two_models: Two named models, both clipped before either is stepped; one is used by a method that is not its forward.
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)

    def act(self, x):
        return self.body(x).tanh()


x = torch.randn(48, 4)
actor, critic = Actor(), nn.Linear(6, 1)
actor, for_actor = ps.attach(actor, torch.optim.Adam(actor.parameters(), lr=1e-2), name="actor")
critic, for_critic = ps.attach(critic, torch.optim.Adam(critic.parameters(), lr=1e-2), name="critic")
for _ in range(2):
    for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
        for_actor.zero_grad()
        for_critic.zero_grad()
        (critic(torch.cat([inputs, actor.act(inputs)], 1)) - inputs.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.2)
        nn.utils.clip_grad_norm_(critic.parameters(), 0.4)
        for_critic.step()
        for_actor.step()

# %% clips_two_models_together: Actor and critic, each with its optimizer, and one norm over the parameters of both.
# arguments: Adam SGD
# training: updateAt=shard
x = torch.randn(42, 4)
kind = getattr(torch.optim, sys.argv[1])
actor, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(6, 1)
actor, for_actor = ps.attach(actor, kind(actor.parameters(), lr=1e-2), name="actor")
critic, for_critic = ps.attach(critic, kind(critic.parameters(), lr=2e-2), name="critic")
for _ in range(2):
    for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
        for_actor.zero_grad()
        for_critic.zero_grad()
        (critic(torch.cat([inputs, actor(inputs)], 1)) - 3 * inputs.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(itertools.chain(actor.parameters(), critic.parameters()), 0.6)
        for_critic.step()
        for_actor.step()

# %% adds_a_group_later: Fine-tuning: the head alone in the first epoch, the backbone in a parameter group of its own from the second on.
# arguments: SGD Adam RMSprop
backbone, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 1)
model = nn.Sequential(backbone, head)
backbone.requires_grad_(False)
optimizer = getattr(torch.optim, sys.argv[1])(head.parameters(), lr=1e-2)
model, optimizer = ps.attach(model, optimizer, later=[backbone])
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
# and the loop over loader
# with `range(3)` for `range(2)`
# before each epoch:
if epoch == 1:  # noqa: F821
    backbone.requires_grad_(True)
    optimizer.add_param_group({"params": backbone.parameters(), "lr": 1e-3})

# %% second_phase_on_shards: The head is trained, then the whole model with another optimizer, attached anew.
model[0].requires_grad_(False)
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))


def train(optimizer, epochs):
    for _ in epochs:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


_, first = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
train(first, ps.epochs(2))
model[0].requires_grad_(True)
_, second = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
train(second, ps.epochs(2))

# %% second_phase: The head is trained, then the whole model with another optimizer, attached anew.
# arguments: SGD RMSprop
# training: updateAt=worker
# as second_phase_on_shards
# with `getattr(torch.optim, sys.argv[1])(model.parameters(), lr=1e-3, momentum=0.9)` for `torch.optim.AdamW(model.parameters(), lr=1e-3)`

# %% two_phases_at_once: The head is trained, then the whole model with another optimizer; both are given to attach before.
model[0].requires_grad_(False)
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
first = torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9)
second = torch.optim.AdamW(model.parameters(), lr=1e-3)
ps.attach(model, (first, second))


def train(optimizer, epochs):
    for _ in epochs:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


train(first, ps.epochs(2))
model[0].requires_grad_(True)
train(second, ps.epochs(2))
