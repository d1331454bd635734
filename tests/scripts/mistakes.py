"""What users get wrong in a script of a job: cells (see `tests.scripts.cells`), headed by words of the sentence that names the remedy."""

import secrets
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import psjob as ps

DATA = TensorDataset(torch.arange(64.0).view(16, 4))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def attached():
    model = net()
    return ps.attach(model, sgd(model))


def step(model, optimizer, x=None):
    model(torch.ones(2, 4) if x is None else x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# %% no_optimizer: which needs one
ps.attach(net())

# %% a_class_of_optimizer: attach takes a torch Module and a torch Optimizer
ps.attach(net(), torch.optim.SGD)

# %% a_list_of_parameters: attach takes a torch Module
model = net()
ps.attach(list(model.parameters()), sgd(model))

# %% optimizer_of_another_model: Add it, or freeze it
ps.attach(net(), sgd(net()))

# %% a_layer_left_out: Add it, or freeze it
model = net()
ps.attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))

# %% attached_twice: give each model a name
attached()
attached()

# %% a_name_with_a_dash: must be a word of letters
model = net()
ps.attach(model, sgd(model), name="my-model")

# %% one_name_twice: each model has a name of its own
for model in (net(), net()):
    ps.attach(model, sgd(model), name="one")

# %% a_second_model_too_late: attach all models, each with its name, before the first
model = net()
model, optimizer = ps.attach(model, sgd(model), name="first")
step(model, optimizer)
other = net()
ps.attach(other, sgd(other), name="second")

# %% a_lazy_module: Run a batch through the model before attach
model = nn.Sequential(nn.LazyLinear(3))
ps.attach(model, sgd(model))

# %% a_model_on_meta: Give the model memory before attach
model = nn.Linear(4, 1, device="meta")
ps.attach(model, sgd(model))

# %% complex_parameters: torch.view_as_real
model = nn.Linear(4, 1, dtype=torch.complex64)
ps.attach(model, sgd(model))

# %% an_optimizer_that_has_stepped: Attach it new
model = net()
optimizer = torch.optim.Adam(model.parameters())
step(model, optimizer)
ps.attach(model, optimizer)

# %% lbfgs: Take torch.optim.Adam
model = net()
ps.attach(model, torch.optim.LBFGS(model.parameters()))

# %% sparse_adam: Take ps.Embedding
model = nn.Embedding(4, 2, sparse=True)
ps.attach(model, torch.optim.SparseAdam(model.parameters()))

# %% max_norm: Leave max_norm out
model = nn.Embedding(4, 2, max_norm=1.0)
ps.attach(model, sgd(model))

# %% a_number_to_put_back: has no state_dict and load_state_dict
model = net()
ps.attach(model, sgd(model), best=3)


# %% a_thing_that_cannot_be_put_back: could not be put back after a restart
class Odd:
    def state_dict(self):
        return {"thing": object()}

    def load_state_dict(self, state): ...


model = net()
ps.attach(model, sgd(model), odd=Odd())

# %% overlap_of_a_scripted_model: leave overlap out
model = torch.jit.script(net())
ps.attach(model, sgd(model), overlap=True)

# %% a_sparse_buffer: Keep what never changes as a plain attribute
model = net()
model.register_buffer("adjacency", torch.eye(3).to_sparse())
ps.attach(model, sgd(model))

# %% a_parameter_of_no_module: as by model.scale = scale
model, scale = net(), nn.Parameter(torch.ones(1))
ps.attach(model, torch.optim.SGD([*model.parameters(), scale], lr=0.1))

# %% a_group_taken_out: let a group rest by requires_grad_(False)
model = net()
optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
ps.attach(model, optimizer)
step(model, optimizer)
del optimizer.param_groups[1:]
step(model, optimizer)


# %% a_loader_of_another_library: as in Doubled(ps.shard(loader))
class Doubled:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return ([2 * x] for (x,) in self.loader)


attached()
ps.shard(Doubled(DataLoader(DATA)))

# %% a_loader_that_is_sharded_already: a loader is given to it once
attached()
ps.shard(ps.shard(DataLoader(DATA)))

# %% catches_what_is_refused: Change them before attach
model, optimizer = attached()
for _ in range(5):
    try:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        step(model, optimizer)
    except BaseException:
        print("goes on")

# %% a_list_for_a_loader: wrap a list as DataLoader
attached()
ps.shard([1, 2, 3])

# %% a_data_set_for_a_loader: give it DataLoader(dataset, batch_size=…)
attached()
ps.shard(DATA)


# %% an_order_that_is_never_the_same: gives another order each time it is asked
class Moody(Sampler):
    def __iter__(self):
        return iter(sorted(range(16), key=lambda _: secrets.randbits(30)))

    def __len__(self):
        return 16


model, optimizer = attached()
for (x,) in ps.shard(DataLoader(DATA, sampler=Moody())):
    step(model, optimizer, x)

# %% negative_epochs: takes a number of epochs
attached()
for _ in ps.epochs(-3):
    pass

# %% epochs_before_attach: attach
for _ in ps.epochs(2):
    attached()

# %% state_given_twice: twice
attached()
ps.state(best=1.0)
ps.state(best=2.0)

# %% state_that_cannot_be_kept: lock
attached()
ps.state(lock=threading.Lock())

# %% a_text_for_a_number: a number or a tensor of one element
attached()
ps.report(loss="small")

# %% a_whole_batch_of_losses: a number or a tensor of one element
attached()
ps.report(loss=torch.ones(3))

# %% clips_a_part: give it model.parameters()
model, _ = attached()
model(torch.ones(2, 4)).sum().backward()
nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)

# %% clips_by_the_largest: Take 2, or clip by value
model, _ = attached()
model(torch.ones(2, 4)).sum().backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))

# %% clips_at_zero: must be above 0
model, _ = attached()
model(torch.ones(2, 4)).sum().backward()
nn.utils.clip_grad_value_(model.parameters(), 0.0)

# %% clips_twice: Clip in one way
model, _ = attached()
model(torch.ones(2, 4)).sum().backward()
nn.utils.clip_grad_value_(model.parameters(), 0.5)
nn.utils.clip_grad_norm_(model.parameters(), 0.5)

# %% loads_an_optimizer: begin from a checkpoint with checkpoint.resumeFrom
_, optimizer = attached()
optimizer.load_state_dict(sgd(net()).state_dict() | {"state": {0: {"momentum_buffer": torch.ones(3, 4)}}})

# %% reads_the_state: optimizer.state_dict()['state'] has a copy
model, optimizer = attached()
step(model, optimizer)
print(optimizer.state[next(model.parameters())])

# %% resets_the_state: Set training.updateAt: worker
_, optimizer = attached()
optimizer.state.clear()

# %% adds_a_group: attach(…, later=[
_, optimizer = attached()
optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

# %% weights_by_hand: Change them before attach
model, optimizer = attached()
step(model, optimizer)
with torch.no_grad():
    for p in model.parameters():
        p.mul_(0.5)
step(model, optimizer)

# %% steps_by_hand: Train with optimizer.step()
model, _ = attached()
for (x,) in ps.shard(DataLoader(DATA, batch_size=4)):
    model(x).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad

# %% a_learning_rate_of_nan: must be a finite number
model, optimizer = attached()
optimizer.param_groups[0]["lr"] = float("nan")
step(model, optimizer)

# %% an_iterator_for_a_loader: loop over it without shard
attached()
ps.shard(iter(DataLoader(DATA)))
