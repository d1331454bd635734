"""Training loops as data, and the script that each is: with psjob's two calls, and without.

All numbers of a loop are exact: every tensor has a multiple of 16 values and torch's fused kernels step, so that a block of a shard and a
tensor of a script are rounded alike. Only a clipped norm is summed in another order.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

Lines = list[str]


@dataclass(frozen=True)
class Setting:
    """What is trained, and by what."""

    model: str = "two layers"
    """A key of MODELS, `two models`: attached by name, with an optimizer each, or `two optimizers` of one model."""
    optimizer: str = "SGD(lr=0.05)"
    """Of torch.optim, without its parameters."""
    scheduler: str = ""
    """Of torch.optim.lr_scheduler, without its optimizer; `by hand`: the script sets the rate."""
    scheduled: str = "step"
    """`step` or `epoch`: when it is asked for the next rate."""
    handed: bool = True
    """`attach` is given the scheduler."""
    double: bool = False
    autocast: bool = False
    averaged: bool = False
    """An average of the first model's weights is kept, which `attach` is given."""
    hook: str = ""
    """A key of HOOKS."""


@dataclass(frozen=True)
class Training:
    """What a batch is used for."""

    zero: str = "first"
    """When gradients are cleared: a key of ZERO."""
    to_none: bool | None = None
    """As `zero_grad` has it."""
    backward: str = "once"
    """A key of BACKWARD, or `closure`: the optimizer calls it."""
    clip: str = ""
    """A key of CLIPS."""
    every: int = 1
    """So many batches make a step."""
    left: str = ""
    """Where some are left at the end of a pass: `` they count for the next, `step` they make one, `length` the condition sees to it."""
    alternates: bool = False
    """Of two models one is stepped at a time."""
    leaves_out: bool = False
    """No step is made where the loss is large."""


@dataclass(frozen=True)
class Pass:
    """A loop over the data, and what is around and within it."""

    head: str = "for"
    """A key of HEADS."""
    around: str = "for epoch in range(2):"
    """The loop around it, or empty."""
    training: Training = Training()
    function: bool = False
    """It lies in a function."""
    skips: bool = False
    """Some batches are left out."""
    leaves: int = 0
    """The batch of a pass after which it is left; 0: none."""
    raised: str = ""
    """A key of RAISED: what is raised at some steps, and caught."""
    looks: str = ""
    """A key of LOOKS, at some steps."""
    evaluates: str = ""
    """A key of EVALUATIONS."""
    evaluates_within: bool = False
    """At some steps, and not after each pass."""
    anew: bool = False
    """The loader is made before each pass."""
    seeds: bool = False
    """A seed is set before each pass."""
    otherwise: bool = False
    """The loop over the data has an `else`."""
    stops: bool = False
    """The loop around ends where the score is no better, and the best weights are loaded then."""
    freezes: bool = False
    """The first parameters are frozen in odd epochs."""
    idle: str = ""
    """Now and then `step`: a step without a backward, `backward`: a backward without a step."""


@dataclass(frozen=True)
class Loop:
    """A script. Its passes follow each other."""

    setting: Setting = Setting()
    passes: tuple[Pass, ...] = (Pass(),)
    rows: int = 26
    """Of the data, of which 4 are a batch."""
    tail: str = ""
    """What follows the last pass: `backward` without a step, `step` by itself."""

    @property
    def exact(self) -> bool:
        """Are its numbers those of plain torch, bit for bit?"""
        return not any(each.training.clip == "norm" for each in self.passes)


MODELS = {
    "two layers": "nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))",
    "one layer": "nn.Sequential(nn.Linear(8, 16))",
    "norm": "nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))",
    "dropout": "nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 16))",
}
TWO = "two models"
PARTS = "two optimizers"
HOOKS = {
    "halves a gradient": "next(models[0].parameters()).register_hook(lambda grad: grad * 0.5)",
    "sees what is accumulated": "next(models[0].parameters()).register_post_accumulate_grad_hook(lambda p: print('accumulated'))",
    "counts steps": "optimizers[0].register_step_post_hook(lambda *_: print('stepped'))",
    "counts forwards": "models[0].register_forward_hook(lambda *_: None)",
}
ZERO = ("first", "middle", "last", "never", "by hand", "of the model")
BACKWARD = {
    "once": ["loss.backward()"],
    "twice": ["loss.backward(retain_graph=True)", "(loss * 0.5).backward()"],
    "two losses": ["loss.backward()", "forward(a * 0.5).abs().mean().backward()"],
    "two losses of one pass": ["out = forward(a)", "out.square().mean().backward(retain_graph=True)", "out.abs().mean().backward()"],
    "a sum of two losses": ["(loss + 0.5 * forward(a * 0.5).square().mean()).backward()"],
    "autograd.grad": [
        "given = [p for p in parameters if p.requires_grad]",
        "for p, grad in zip(given, torch.autograd.grad(loss, given)):", "    p.grad = grad",
    ],
    "a second derivative": [
        "(slope,) = torch.autograd.grad(loss, parameters[-1:], create_graph=True)", "(loss + 0.5 * slope.square().sum()).backward()",
    ],
    "by hand after it": ["loss.backward()", "for p in parameters:", "    if p.grad is not None:", "        p.grad.mul_(0.5)"],
}  # fmt: skip
HEADS = {
    "for": ["for a, b in loader:"],
    "enumerate": ["for i, (a, b) in enumerate(loader):"],
    "zip": ["for (a, b), (c, _) in zip(loader, other):", "    a = a + 0.5 * c[: len(a)].mean(0)"],
    "enumerate from": ["for i, (a, b) in enumerate(loader, start=n):"],
    "zip of two passes": ["for (a, b), (c, _) in zip(loader, loader):", "    a = a + 0.5 * c.mean(0)"],
    "cycle": ["for a, b in itertools.islice(itertools.cycle(loader), 9):"],
    "islice and the rest": ["batches = iter(loader)", "for a, b in itertools.chain(itertools.islice(batches, 2), batches):"],
    "numbers": ["for i, (a, b) in zip(range(5), loader):"],
    "zip of the same": ["batches = iter(loader)", "for (a, b), (c, _) in zip(batches, batches):", "    a = a + 0.5 * c.mean(0)"],
    "list": ["for a, b in list(loader):"],
    "islice": ["for a, b in itertools.islice(loader, 4):"],
    "chain": ["for a, b in itertools.chain(loader, other):"],
    "next": [
        "batches = iter(loader)", "while True:", "    try:", "        a, b = next(batches)", "    except StopIteration:",
        "        break",
    ],
    "next or none": [
        "batches = iter(loader)", "while True:", "    batch = next(batches, None)", "    if batch is None:", "        break",
        "    a, b = batch",
    ],
    "next by number": ["batches = iter(loader)", "for i in range(len(loader)):", "    a, b = next(batches)"],
    "next, fewer than there are": ["batches = iter(loader)", "for i in range(3):", "    a, b = next(batches)"],
    "first of each": ["for i in range(5):", "    a, b = next(iter(loader))"],
    "beside": [
        "for a, b in loader:", "    try:", "        c, _ = next(beside)", "    except StopIteration:", "        beside = iter(other)",
        "        c, _ = next(beside)", "    a = a + 0.5 * c.mean(0)",
    ],
    "micro": ["batches = iter(loader)", "while micro := list(itertools.islice(batches, 3)):"],
    "a generator": ["for a, b in twice(loader):"],
    "a step further": [
        "batches = iter(loader)", "following = next(batches, None)", "while following is not None:", "    a, b = following",
        "    following = next(batches, None)",
    ],
}  # fmt: skip
"""The head of a loop over `loader`; the last line with a colon at its least indent is followed by the body."""
CLIPS = {
    "norm": "nn.utils.clip_grad_norm_({}.parameters(), 0.2)",
    "value": "nn.utils.clip_grad_value_({}.parameters(), 0.02)",
}
RAISED = {
    "before a step": (["if n % 4 == 2:", "    raise ValueError('a bad batch')"], []),
    "after a step": ([], []),
    "before a backward": ([], ["if n % 4 == 2:", "    raise ValueError('a bad batch')"]),
}
"""Lines between backward and step, and before the forward."""
RAISES = ["if n % 4 == 2:", "    raise ValueError('a bad batch')"]
NEW_LOADER = "loader = ps.shard(DataLoader(TensorDataset(x, y), batch_size=4))"
LOOKS = {
    "weights": ["print('weights', float(parameters[0].detach().sum()))"],
    "a copy": ["kept = copy.deepcopy(models[0].state_dict())", "print('copied', float(next(iter(kept.values())).sum()))"],
    "gradients": ["print('gradients', [p.grad is not None for p in parameters])"],
    "rates": ["print('rate', [group['lr'] for each in optimizers for group in each.param_groups])"],
    "a save": ["torch.save(models[0].state_dict(), 'saved.pt')"],
    "data": ["shown = next(iter(val))"],
    "a swap": [
        "there = copy.deepcopy(models[0].state_dict())",
        "models[0].load_state_dict({name: value * 0.5 if value.is_floating_point() else value for name, value in there.items()})",
        "print('swapped', float(forward(probe).sum()))", "models[0].load_state_dict(there)",
    ],
}  # fmt: skip
EVALUATIONS = {
    "eval and no_grad": [
        "for each in models:", "    each.eval()", "with torch.no_grad():", "    for a, b in val:",
        "        total += float((forward(a) - b).square().mean())",
        "for each in models:", "    each.train()",
    ],
    "no_grad": ["with torch.no_grad():", "    for k, (a, b) in enumerate(val):", "        total += float(forward(a).sum())"],
    "inference": ["with torch.inference_mode():", "    for a, b in val:", "        total += float(forward(a).sum())"],
    "without": ["for a, b in val:", "    total += float(forward(a).sum().detach())"],
    "eval only": [
        "for each in models:", "    each.eval()", "for a, b in val:", "    total += float(forward(a).sum().detach())",
        "for each in models:", "    each.train()",
    ],
    "left": ["with torch.no_grad():", "    for a, b in val:", "        total += float(forward(a).sum())", "        break"],
    "the training data": ["with torch.no_grad():", "    for a, b in loader:", "        total += float(forward(a).sum())"],
    "with a plain loader": ["with torch.no_grad():", "    for a, b in plain:", "        total += float(forward(a).sum())"],
    "a gradient of the input": [
        "given = probe.clone().requires_grad_()", "total += float(torch.autograd.grad(forward(given).sum(), given)[0].sum())",
    ],
}  # fmt: skip


STOPS = [
    "with torch.no_grad():", "    score = sum(float((forward(a) - b).square().mean()) for a, b in val)",
    "if score < best:", "    best, best_weights = score, copy.deepcopy(models[0].state_dict())",
    "elif n > 9:", "    break",
]  # fmt: skip


def script(loop: Loop) -> str:
    """Its source, with psjob."""
    lines = [*_head(loop), ""]
    for number, each in enumerate(loop.passes):
        lines += [*_pass(loop.setting, each, number), ""]
    if loop.tail:
        a_batch = ["for each in optimizers:", "    each.zero_grad()", "forward(probe).square().mean().backward()"]
        lines += a_batch if loop.tail == "backward" else ["for each in optimizers:", "    each.step()"]
    if loop.setting.averaged:
        lines += ["print('average', float(next(average.parameters()).sum()))"]
    lines += ["print('end', json.dumps([p.detach().double().flatten().tolist() for each in models for p in each.state_dict().values()]))"]
    return "\n".join(lines) + "\n"


def without(source: str) -> str:
    """The same script of plain torch."""
    kept = [line for line in source.splitlines() if "ps.attach(" not in line and line != "import psjob as ps"]
    return re.sub(r"\bps\.shard\(", "(", re.sub(r"\bps\.epochs\(", "range(", "\n".join(kept))) + "\n"


def _head(loop: Loop) -> Lines:
    setting = loop.setting
    lines = ["import copy", "import itertools", "import json", "import math", "", "import torch", "from torch import nn"]
    lines += ["from torch.utils.data import DataLoader, TensorDataset", "", "import psjob as ps", ""]
    lines += ["torch.set_default_dtype(torch.float64)"] * setting.double + ["torch.manual_seed(1)"]
    for text in _attached(setting):
        lines += [text]
    owners, names = _models(setting), _names(setting)
    lines += [f"models, optimizers = [{', '.join(owners)}], [{', '.join(f'{name}_optimizer' for name in names)}]"]
    lines += [f"parameters = [{', '.join(f'*{name}.parameters()' for name in owners)}]"]
    lines += [f"x = torch.randn({loop.rows}, 8)", "y, probe = torch.tanh(x @ torch.randn(8, 16)), torch.randn(4, 8)"]
    lines += [NEW_LOADER]
    lines += ["other = ps.shard(DataLoader(TensorDataset(x.flip(0), y), batch_size=4))"]
    lines += ["val = ps.shard(DataLoader(TensorDataset(x[:10], y[:10]), batch_size=4))"]
    lines += ["plain = DataLoader(TensorDataset(x[:10], y[:10]), batch_size=4)"]
    lines += ["n, caught, total, best, best_weights = 0, 0, 0.0, math.inf, None"]
    if any(each.head == "beside" for each in loop.passes):
        lines += ["beside = iter(other)"]
    if any(each.head == "a generator" for each in loop.passes):
        lines += ["", "", "def twice(batches):", "    for batch in batches:", "        yield batch", "        yield batch", "", ""]
    forward = ["return second(first(a))" if setting.model == TWO else "return model(a)"]
    if setting.autocast:
        forward = ["with torch.autocast('cpu', dtype=torch.bfloat16):", *_indented(forward)]
    lines += ["", "", "def forward(a):", *_indented(forward), "", ""]
    return lines + ([HOOKS[setting.hook]] if setting.hook else [])


def _attached(setting: Setting) -> Iterator[str]:
    """Lines that make the models and optimizers, and attach them."""
    made = ("nn.Linear(8, 16)", "nn.Sequential(nn.Tanh(), nn.Linear(16, 16))")
    owners, names = _models(setting), _names(setting)
    if setting.model != TWO:
        made = (MODELS["two layers" if setting.model == PARTS else setting.model],)
    given = ", average=average" if setting.averaged else ""
    for owner, text in zip(owners, made, strict=True):
        yield f"{owner} = {text}"
    if setting.averaged:
        yield f"average = torch.optim.swa_utils.AveragedModel({owners[0]})"
    trained = ("model[0]", "model[2]") if setting.model == PARTS else owners
    for name, text in zip(names, trained, strict=True):
        yield f"{name}_optimizer = torch.optim.{setting.optimizer.replace('(', f'({text}.parameters(), ', 1)}"
        if setting.scheduler and setting.scheduler != "by hand":
            yield f"{name}_rates = torch.optim.lr_scheduler.{setting.scheduler.replace('(', f'({name}_optimizer, ', 1)}"
            given += f", {name}_rates={name}_rates" if setting.handed and setting.model != TWO else ""
    if setting.model == PARTS:
        yield f"model, (first_optimizer, second_optimizer) = ps.attach(model, (first_optimizer, second_optimizer){given})"
        return
    for name in names:
        own = f', name="{name}"' if setting.model == TWO else ""
        if own and setting.scheduler and setting.scheduler != "by hand" and setting.handed:
            own += f", {name}_rates={name}_rates"
        yield f"{name}, {name}_optimizer = ps.attach({name}, {name}_optimizer{own}{given})"
        given = ""


def _pass(setting: Setting, each: Pass, number: int) -> Lines:
    training = each.training
    head = HEADS[each.head]
    body = _body(setting, each)
    if each.head == "micro":
        body = ["k = 0", "for a, b in micro:", *_indented(["k += 1", *body])]
    lines = [*head, *_indented(body)]
    if each.otherwise and each.head not in ("micro",):
        lines += ["else:", "    print('to its end')"]
    if training.left == "step" and training.every > 1:
        lines += ["if since:", *_indented(_step(setting, training))]
    epoch_steps = _schedule(setting, "epoch")
    if each.evaluates and not each.evaluates_within:
        lines += _evaluation(each)
    lines = [NEW_LOADER] * each.anew + ["torch.manual_seed(epoch)"] * each.seeds + lines
    if each.function:
        called = [f"def train_{number}(epoch):", *_indented(["global n, caught, total, since, beside, loader", *lines]), "", ""]
        lines = [f"train_{number}(epoch)"]
    else:
        called = []
    lines += epoch_steps
    if each.freezes:
        lines = ["parameters[0].requires_grad_(epoch % 2 == 0)", *lines]
    before = ["since = 0"] if training.every > 1 else []
    if setting.averaged:
        lines += ["average.update_parameters(models[0])"]
    if not each.around:
        return [*before, *called, "epoch = 0", *lines]
    after = []
    if each.stops:
        lines += STOPS
        after = ["if best_weights is not None:", "    models[0].load_state_dict(best_weights)", "    print('best', best)"]
    if each.around.startswith("while"):
        return [*before, *called, "epoch = 0", each.around, *_indented([*lines, "epoch += 1"]), *after]
    return [*before, *called, each.around, *_indented(lines), *after]


def _body(setting: Setting, each: Pass) -> Lines:
    lines = ["n += 1"]
    if each.skips:
        lines += ["if n % 5 == 3:", "    continue"]
    if each.idle == "step":
        lines += ["if n % 4 == 1:", *_indented(["for each in optimizers:", "    each.zero_grad()", "    each.step()"])]
    if each.idle == "backward":
        lines += ["if n % 4 == 1:", "    forward(probe).mean().backward()"]
    if each.looks:
        lines += ["if n % 3 == 1:", *_indented(LOOKS[each.looks])]
    made = _trained(setting, each)
    if each.raised:
        made = ["try:", *_indented(made), "except ValueError:", "    caught += 1"]
    lines += made
    if each.evaluates and each.evaluates_within:
        lines += ["if n % 3 == 0:", *_indented(_evaluation(each))]
    if each.leaves:
        lines += [f"if n % {each.leaves} == 0:", "    break"]
    return lines


def _trained(setting: Setting, each: Pass) -> Lines:
    training = each.training
    between, before = RAISED.get(each.raised, ([], []))
    zero = _zero(training)
    forward = ["loss = (forward(a) - b).square().mean()"]
    if training.backward == "closure":
        clips = [CLIPS[training.clip].format(name) for name in _models(setting)] if training.clip else []
        made = [*before, "def closure():", *_indented([*zero, *forward, "loss.backward()", *clips, "return loss"])]
        after = RAISES if each.raised == "after a step" else []
        return [*made, *between, *_steps(setting, training, "closure"), *_schedule(setting, "step", "total + n"), *after]
    lines = [*before]
    at_once = training.every == 1
    if training.zero in ("first", "by hand", "of the model") and at_once:
        lines += zero
    lines += forward
    if training.zero == "middle" and at_once:
        lines += zero
    lines += [*BACKWARD[training.backward], *between]
    step = _step(setting, training)
    if training.leaves_out:
        step = ["if float(loss.detach()) < 0.9:", *_indented(step)]
    if each.raised == "after a step":
        step += RAISES
    if at_once:
        return lines + step
    condition = f"if n % {training.every} == 0"
    if training.left == "length" and each.head in ("enumerate", "next by number"):
        condition = f"if (i + 1) % {training.every} == 0 or i + 1 == len(loader)"
    return [*lines, "since += 1", f"{condition}:", *_indented(step)]


def _zero(training: Training) -> Lines:
    words = "" if training.to_none is None else f"set_to_none={training.to_none}"
    match training.zero:
        case "never":
            return []
        case "by hand":
            return ["for p in parameters:", "    p.grad = None"]
        case "of the model":
            return ["for each in models:", f"    each.zero_grad({words})"]
    return ["for each in optimizers:", f"    each.zero_grad({words})"]


def _step(setting: Setting, training: Training) -> Lines:
    lines = [*_steps(setting, training), *_schedule(setting, "step")]
    if training.zero == "last" or (training.every > 1 and training.zero != "never"):
        lines += _zero(training)
    return lines + (["since = 0"] if training.every > 1 else [])


def _steps(setting: Setting, training: Training, closure: str = "") -> Lines:
    names = _names(setting)
    lines: Lines = []
    for number, name in enumerate(names):
        owner = f"model[{2 * number}]" if setting.model == PARTS else name
        made = [CLIPS[training.clip].format(owner)] if training.clip and not closure else []
        made += [f"{name}_optimizer.step({closure if number == 0 else ''})"]
        lines += [f"if n % 2 == {number}:", *_indented(made)] if training.alternates and len(names) > 1 else made
    return lines


def _schedule(setting: Setting, when: str, measured: str = "") -> Lines:
    if not setting.scheduler or setting.scheduled != when:
        return []
    if setting.scheduler == "by hand":
        return ["for each in optimizers:", "    for group in each.param_groups:", "        group['lr'] = 0.05 / (1 + n)"]
    measured = measured or ("float(loss.detach())" if when == "step" else "total + n")
    given = measured if setting.scheduler.startswith("ReduceLROnPlateau") else ""
    return [f"{name}_rates.step({given})" for name in _names(setting)]


def _models(setting: Setting) -> tuple[str, ...]:
    return ("first", "second") if setting.model == TWO else ("model",)


def _names(setting: Setting) -> tuple[str, ...]:
    """Of optimizers and their schedulers."""
    return ("first", "second") if setting.model in (TWO, PARTS) else ("model",)


def _evaluation(each: Pass) -> Lines:
    return [*EVALUATIONS[each.evaluates], "print('evaluated', total)"]


def _indented(lines: Lines) -> Lines:
    return textwrap.indent("\n".join(lines), "    ").splitlines()
