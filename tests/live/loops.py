"""Training loops as data, and the script that each is: with psjob's two calls, and without.

All numbers of a loop are exact: every tensor has a multiple of 16 values and torch's fused kernels step, so that a block of a shard and a
tensor of a script are rounded alike. Only a clipped norm is summed in another order.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

Lines = list[str]


@dataclass(frozen=True)
class Setting:
    """What is trained, and by what."""

    model: str = "two layers"
    """A key of MODELS, or `two models`: attached by name, with an optimizer each."""
    optimizer: str = "SGD(lr=0.05)"
    """Of torch.optim, without its parameters."""
    scheduler: str = ""
    """Of torch.optim.lr_scheduler, without its optimizer; `by hand`: the script sets the rate."""
    scheduled: str = "step"
    """`step` or `epoch`: when it is asked for the next rate."""
    handed: bool = True
    """`attach` is given the scheduler."""
    double: bool = False
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
    "before a backward": ([], ["if n % 4 == 2:", "    raise ValueError('a bad batch')"]),
}
"""Lines between backward and step, and before the forward."""
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


def script(loop: Loop) -> str:
    """Its source, with psjob."""
    lines = [*_head(loop), ""]
    for number, each in enumerate(loop.passes):
        lines += [*_pass(loop.setting, each, number), ""]
    if loop.tail:
        a_batch = ["for each in optimizers:", "    each.zero_grad()", "forward(probe).square().mean().backward()"]
        lines += a_batch if loop.tail == "backward" else ["for each in optimizers:", "    each.step()"]
    lines += ["print('end', json.dumps([p.detach().double().flatten().tolist() for each in models for p in each.state_dict().values()]))"]
    return "\n".join(lines) + "\n"


def without(source: str) -> str:
    """The same script of plain torch."""
    kept = [line for line in source.splitlines() if "ps.attach(" not in line and line != "import psjob as ps"]
    return re.sub(r"\bps\.shard\(", "(", re.sub(r"\bps\.epochs\(", "range(", "\n".join(kept))) + "\n"


def _head(loop: Loop) -> Lines:
    setting = loop.setting
    lines = ["import copy", "import itertools", "import json", "", "import torch", "from torch import nn"]
    lines += ["from torch.utils.data import DataLoader, TensorDataset", "", "import psjob as ps", ""]
    lines += ["torch.set_default_dtype(torch.float64)"] * setting.double + ["torch.manual_seed(1)"]
    two = setting.model == TWO
    names = _names(setting)
    made = ("nn.Linear(8, 16)", "nn.Sequential(nn.Tanh(), nn.Linear(16, 16))") if two else (MODELS[setting.model],)
    for name, text in zip(names, made, strict=True):
        lines += [f"{name} = {text}", f"{name}_optimizer = torch.optim.{setting.optimizer.replace('(', f'({name}.parameters(), ', 1)}"]
        handed = ""
        if setting.scheduler and setting.scheduler != "by hand":
            lines += [f"{name}_rates = torch.optim.lr_scheduler.{setting.scheduler.replace('(', f'({name}_optimizer, ', 1)}"]
            handed = f", {name}_rates={name}_rates" if setting.handed else ""
        named = f', name="{name}"' if two else ""
        lines += [f"{name}, {name}_optimizer = ps.attach({name}, {name}_optimizer{named}{handed})"]
    lines += [f"models, optimizers = [{', '.join(names)}], [{', '.join(f'{name}_optimizer' for name in names)}]"]
    lines += [f"parameters = [{', '.join(f'*{name}.parameters()' for name in names)}]"]
    lines += [f"x = torch.randn({loop.rows}, 8)", "y, probe = torch.tanh(x @ torch.randn(8, 16)), torch.randn(4, 8)"]
    lines += ["loader = ps.shard(DataLoader(TensorDataset(x, y), batch_size=4))"]
    lines += ["other = ps.shard(DataLoader(TensorDataset(x.flip(0), y), batch_size=4))"]
    lines += ["val = ps.shard(DataLoader(TensorDataset(x[:10], y[:10]), batch_size=4))"]
    lines += ["plain = DataLoader(TensorDataset(x[:10], y[:10]), batch_size=4)"]
    lines += ["n, caught, total = 0, 0, 0.0"]
    if any(each.head == "beside" for each in loop.passes):
        lines += ["beside = iter(other)"]
    if any(each.head == "a generator" for each in loop.passes):
        lines += ["", "", "def twice(batches):", "    for batch in batches:", "        yield batch", "        yield batch", "", ""]
    lines += ["", "", "def forward(a):", "    return second(first(a))" if two else "    return model(a)", "", ""]
    return lines + ([HOOKS[setting.hook]] if setting.hook else [])


def _pass(setting: Setting, each: Pass, number: int) -> Lines:
    training = each.training
    head = HEADS[each.head]
    body = _body(setting, each)
    if each.head == "micro":
        body = ["k = 0", "for a, b in micro:", *_indented(["k += 1", *body])]
    lines = [*head, *_indented(body)]
    if training.left == "step" and training.every > 1:
        lines += ["if since:", *_indented(_step(setting, training))]
    epoch_steps = _schedule(setting, "epoch")
    if each.evaluates and not each.evaluates_within:
        lines += _evaluation(each)
    if each.function:
        called = [f"def train_{number}(epoch):", *_indented(["global n, caught, total, since, beside", *lines]), "", ""]
        lines = [f"train_{number}(epoch)"]
    else:
        called = []
    lines += epoch_steps
    if each.freezes:
        lines = ["parameters[0].requires_grad_(epoch % 2 == 0)", *lines]
    before = ["since = 0"] if training.every > 1 else []
    if not each.around:
        return [*before, *called, "epoch = 0", *lines]
    if each.around.startswith("while"):
        return [*before, *called, "epoch = 0", each.around, *_indented([*lines, "epoch += 1"])]
    return [*before, *called, each.around, *_indented(lines)]


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
        clips = [CLIPS[training.clip].format(name) for name in _names(setting)] if training.clip else []
        made = [*before, "def closure():", *_indented([*zero, *forward, "loss.backward()", *clips, "return loss"])]
        return [*made, *between, *_steps(setting, training, "closure"), *_schedule(setting, "step")]
    lines = [*before]
    at_once = training.every == 1
    if training.zero in ("first", "by hand", "of the model") and at_once:
        lines += zero
    lines += forward
    if training.zero == "middle" and at_once:
        lines += zero
    lines += [*BACKWARD[training.backward], *between]
    step = _step(setting, training)
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
        made = [CLIPS[training.clip].format(name)] if training.clip and not closure else []
        made += [f"{name}_optimizer.step({closure if number == 0 else ''})"]
        lines += [f"if n % 2 == {number}:", *_indented(made)] if training.alternates and len(names) > 1 else made
    return lines


def _schedule(setting: Setting, when: str) -> Lines:
    if not setting.scheduler or setting.scheduled != when:
        return []
    if setting.scheduler == "by hand":
        return ["for each in optimizers:", "    for group in each.param_groups:", "        group['lr'] = 0.05 / (1 + n)"]
    measured = "float(loss.detach())" if when == "step" else "total + n"
    given = measured if setting.scheduler.startswith("ReduceLROnPlateau") else ""
    return [f"{name}_rates.step({given})" for name in _names(setting)]


def _names(setting: Setting) -> tuple[str, ...]:
    return ("first", "second") if setting.model == TWO else ("model",)


def _evaluation(each: Pass) -> Lines:
    return [*EVALUATIONS[each.evaluates], "print('evaluated', total)"]


def _indented(lines: Lines) -> Lines:
    return textwrap.indent("\n".join(lines), "    ").splitlines()
