"""Models: layers, dtypes, compiled, frozen, tied and parametrized ones, and who gives them their first weights."""

import math
import sys

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(0)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% cnn_batchnorm: A small CNN with BatchNorm and dropout left out, evaluated each epoch.
images, labels = torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,))
train = ps.shard(DataLoader(TensorDataset(images[:36], labels[:36]), batch_size=6, shuffle=True))
test = ps.shard(DataLoader(TensorDataset(images[36:], labels[36:]), batch_size=5))
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    model.train()
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    seen = 0
    with torch.no_grad():
        for x, y in test:
            seen += len(x)
            correct = (model(x).argmax(1) == y).sum().item()
    print("seen", seen, "correct in the last batch", correct)


# %% tiny_transformer: A small language model with tied weights, warm-up and a cosine.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layer(self.tokens(ids) + self.places(torch.arange(ids.shape[1])), mask))


text = torch.randint(0, 20, (32, 12))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-5)
model, optimizer = ps.attach(model, optimizer)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 3, 0.5 + 0.5 * math.cos(step / 8)))
for (ids,) in ps.shard(DataLoader(TensorDataset(text), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()

# %% autoencoder: A convolutional autoencoder in channels_last, with transposed convolutions.
images = torch.randn(24, 1, 8, 8)
model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.GELU(), nn.Conv2d(4, 4, 3, 1, 1), nn.GELU(), nn.ConvTranspose2d(4, 1, 4, 2, 1))
model = model.to(memory_format=torch.channels_last)
model, optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in range(2):
    for (batch,) in ps.shard(DataLoader(TensorDataset(images), batch_size=4, shuffle=True)):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.l1_loss(model(batch.to(memory_format=torch.channels_last)), batch).backward()
        optimizer.step()


# %% vae: A variational autoencoder, whose noise is each worker's own.
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, dim=1)
        code = mean + (0.5 * spread).exp() * torch.randn(mean.shape, generator=noise)
        loss = (self.decode(code) - x).pow(2).sum(1) - 0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1)
        return loss.mean()


noise = torch.Generator().manual_seed(ps.rank())
model = VAE()
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
for _ in range(2):
    for (x,) in ps.shard(DataLoader(TensorDataset(torch.arange(320.0).view(40, 8).sin()), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

# %% distillation: A teacher in eval mode beside the student.
teacher = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 4)).eval().requires_grad_(False)
student = nn.Linear(5, 4)
optimizer = torch.optim.NAdam(student.parameters(), lr=1e-2)
student, optimizer = ps.attach(student, optimizer)
loader = ps.shard(DataLoader(TensorDataset(torch.randn(50, 5)), batch_size=5, shuffle=True))
for _ in range(2):
    for (x,) in loader:
        with torch.no_grad():
            wanted = teacher(x).log_softmax(-1)
        loss = nn.functional.kl_div(student(x).log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% triplet: Three passes of one network and a triplet loss.
data = TensorDataset(torch.randn(40, 6), torch.randn(40, 6), torch.randn(40, 6))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
loss = nn.TripletMarginLoss(margin=0.5)
for anchor, near, far in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    loss(model(anchor), model(near), model(far)).backward()
    optimizer.step()

# %% multi_task: A shared body and a head for each task; a batch trains one head.
body, heads = nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.ModuleDict({"sum": nn.Linear(16, 1), "max": nn.Linear(16, 1)})
model = nn.ModuleList([body, heads])
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
targets = {"sum": lambda x: x.sum(1, keepdim=True), "max": lambda x: x.amax(1, keepdim=True)}
for i, (inputs,) in enumerate(ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))):
    task = ("sum", "max")[i % 2]
    optimizer.zero_grad()
    nn.functional.mse_loss(heads[task](body(inputs)), targets[task](inputs)).backward()
    optimizer.step()


# %% conditional_parameters: A layer that some batches use and others do not.
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if x.sum() > 0:
            h = torch.tanh(self.second(h))
        return self.out(h)


model = Gated()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
# and the loop


# %% frozen_and_tied: A frozen backbone and an output layer tied to the embedding.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.backbone = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight
        self.backbone.requires_grad_(False)

    def forward(self, tokens):
        return self.out(torch.tanh(self.backbone(self.embed(tokens))))


tokens = torch.randint(0, 12, (40, 5))
model = Model()
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for (batch,) in ps.shard(DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

# %% unfreezes_later: A backbone that is frozen in the first epoch; the optimizer has all parameters from the beginning.
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model[0].requires_grad_(False)
model, optimizer = ps.attach(model, optimizer)
# and the loop
# with `range(3)` for `range(2)`
# before each epoch:
if epoch == 1:  # noqa: F821
    model[0].requires_grad_(True)


# %% lora: Frozen layers, with matrices of low rank that are trained beside them.
class LoRA(nn.Module):
    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.t() @ self.up.t()


model = nn.Sequential(LoRA(nn.Linear(6, 8), 2), nn.Tanh(), LoRA(nn.Linear(8, 1), 2))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
model, optimizer = ps.attach(model, optimizer)
# and the loop

# %% parametrized: Weights under a parametrization instead of a change by hand.
# arguments: weight_norm spectral_norm orthogonal old_weight_norm
MAKE = {
    "weight_norm": parametrizations.weight_norm, "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal, "old_weight_norm": torch.nn.utils.weight_norm,
}  # fmt: skip
model = nn.Sequential(MAKE[sys.argv[1]](nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
# and the loop

# %% functional_call: The model's parameters are given to functional_call.
model, optimizer = ps.attach(model, optimizer)
# and the loop
# with `functional_call(model, dict(model.named_parameters()), (inputs,))` for `model(inputs)`

# %% gradients_by_functions: Gradients by torch.func in place of backward.
# arguments: grad vmap
model, optimizer = ps.attach(model, optimizer)


def loss_of(weights, inputs, targets):
    return nn.functional.mse_loss(functional_call(model, weights, (inputs,)), targets)


for _epoch in ps.epochs(2):
    for inputs, targets in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        if sys.argv[1] == "grad":
            found, _ = grad_and_value(loss_of)(weights, inputs, targets)
        else:
            each = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, inputs, targets)
            found = {name: gradients.mean(0) for name, gradients in each.items()}
        for name, p in model.named_parameters():
            p.grad = found[name]
        optimizer.step()

# %% compiled: torch.compile, with a backend that needs no compiler.
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
fast = torch.compile(model, backend="aot_eager")
# and the loop
# with `fast(inputs)` for `model(inputs)`

# %% compiled_before_attach: torch.compile first, attach then.
model = torch.compile(model, backend="aot_eager")
model, optimizer = ps.attach(model, optimizer)
# and the loop

# %% autocast_bfloat16: Mixed precision in bfloat16, without a scaler.
model, optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% bfloat16_parameters: A model whose parameters are bfloat16, as large ones are kept.
x, model = x.bfloat16(), model.bfloat16()
data = TensorDataset(x, x.sum(1, keepdim=True))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
# and the loop


# %% double_precision: Parameters in float64, of odd shapes: a number, an empty tensor, four dimensions, a transposed one.
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.cube, self.turned = nn.Parameter(torch.randn(2, 1, 3, 1)), nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x):
        return self.scale * (x @ self.turned).sum(1) * self.cube.sum() + self.empty.sum()


x = torch.randn(40, 3, dtype=torch.float64)
data = TensorDataset(x, x.sum(1))
model = Odd().double()
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
# and the loop


# %% complex_parameters: A layer with a complex parameter.
class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


data = TensorDataset(x, torch.ones(48, 2))
model = Wave()
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
# and the loop

# %% complex_as_real: A complex layer whose parameter is real: the pairs of numbers that make it up.
# as complex_parameters
# with `torch.view_as_real(torch.randn(6, 2, dtype=torch.complex64))` for `torch.randn(6, 2, dtype=torch.complex64)`
# with `torch.view_as_complex(self.weight)).abs()` for `self.weight).abs()`

# %% dense_gradients: An embedding with dense gradients.
data = TensorDataset(torch.randint(0, 20, (48, 3)), torch.zeros(48, 4))
model = nn.EmbeddingBag(20, 4, mode="sum")
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.1))
# and the loop

# %% sparse_gradients: An embedding with sparse gradients.
# as dense_gradients
# with `nn.EmbeddingBag(20, 4, sparse=True, mode="sum")` for `nn.EmbeddingBag(20, 4, mode="sum")`
# with `torch.optim.SparseAdam` for `torch.optim.Adam`

# %% sparse_gradients_of_adagrad: An embedding with sparse gradients, and an optimizer of which a dense step is the same.
# as sparse_gradients
# with `torch.optim.Adagrad` for `torch.optim.SparseAdam`

# %% embedding_max_norm: An embedding that brings its rows to a norm while it looks them up.
data = TensorDataset(torch.randint(0, 20, (48, 3)), torch.zeros(48, 1))
model = nn.Sequential(nn.Embedding(20, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 1))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))
# and the loop


# %% embedding_normed_in_forward: Rows of an embedding are brought to a norm in the forward pass, and the weights are left as they are.
class Normed(nn.Embedding):
    def forward(self, ids):
        rows = super().forward(ids)
        return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1.0)


# as embedding_max_norm
# with `Normed(20, 4, padding_idx=0)` for `nn.Embedding(20, 4, max_norm=1.0)`

# %% sync_batchnorm: Layers that torch's converter has made SyncBatchNorm.
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
# and the loop

# %% group_norm: GroupNorm, whose result does not depend on the batch, in the place of SyncBatchNorm.
# as sync_batchnorm
# with `nn.GroupNorm(2, 8)` for `nn.BatchNorm1d(8)`
# with `model` for `nn.SyncBatchNorm.convert_sync_batchnorm(model)`

# %% begins_from_a_checkpoint: Weights that were trained before are loaded before attach; the head is new.
missing, unexpected = model.load_state_dict({"0.weight": torch.full((8, 6), 0.1), "0.bias": torch.zeros(8)}, strict=False)
assert not unexpected and len(missing) == 2
optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters(), "lr": 1e-2}])
model, optimizer = ps.attach(model, optimizer)
# and the loop

# %% initialised_before_attach: Layers are initialised before attach, each worker by its own chance: rank 0 gives the weights.
model.apply(lambda layer: isinstance(layer, nn.Linear) and nn.init.xavier_uniform_(layer.weight))
model, optimizer = ps.attach(model, optimizer)
# and the loop

# %% initialised_after_attach: Layers are initialised after attach.
model, optimizer = ps.attach(model, optimizer)
model.apply(lambda layer: isinstance(layer, nn.Linear) and nn.init.xavier_uniform_(layer.weight))
# and the loop

# %% weights_loaded_after_attach: Weights of a file are loaded into the model after attach.
kept = {name: value + 0.1 for name, value in model.state_dict().items()}
model, optimizer = ps.attach(model, optimizer)
model.load_state_dict(kept)
# and the loop
