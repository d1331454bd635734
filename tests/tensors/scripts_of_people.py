"""Loops over data as people write them, in the head of `restarted_scripts`, and a strategy of hypothesis for more of the kind."""

from __future__ import annotations

import re
import textwrap
from typing import Any, Final

from hypothesis import strategies as st


def cells(text: str) -> dict[str, str]:
    """Scripts by name, of a text in the percent format: each begins with a line `# %% NAME`."""
    return dict(re.findall(r"^# %% (.+)((?:\n(?!# %% ).*)+)", text, re.MULTILINE))


def each(target: str, over: str, step: str, epochs: int = 0) -> str:
    """A loop that makes a step with each of what it goes over, in so many epochs; 0: in none."""
    loop = f"for {target} in {over}:\n    step({step})\n"
    return "\n" + (f"for epoch in range({epochs}):\n" + textwrap.indent(loop, "    ") if epochs else loop)


LOOPS: Final = {
    "a loop": each("i, b", "enumerate(loader)", "b, i", 3),
    "gradients are accumulated": each("i, b", "enumerate(loader)", "b, i, last=i % 2 == 1", 3),
    "progress": each("i, b", "enumerate(tqdm(loader, disable=True))", "b, i", 2),
    "progress of an enumerate": each("i, b", "tqdm(enumerate(loader), disable=True)", "b, i", 2),
    "enumerates in each other": each("j, (i, b)", "enumerate(enumerate(loader))", "b, i, j"),
    "zip with the shorter one behind": each("b, c", "zip(other, loader)", "b, c", 2),
    "progress of a counted zip": each("i, (b, c)", "enumerate(tqdm(zip(loader, other), disable=True))", "b, c, i", 2),
    "a strict zip": each("b, c", "zip(loader, loader, strict=True)", "b, c", 3),
    "zip of what counts": each("(i, b), (j, c)", "zip(enumerate(loader), enumerate(other))", "b, c, i, j", 2),
    "zip of progress": each("b, c", "zip(tqdm(loader, disable=True), tqdm(other, disable=True))", "b, c", 2),
    "zip with numbers": each("b, i", "zip(tqdm(loader, disable=True), range(100))", "b, i"),
    "a part of a pass": each("b", "itertools.islice(tqdm(loader, disable=True), 4)", "b"),
    "one after the other": each("i, b", "enumerate(itertools.chain(loader, other))", "b, i"),
    "a look in each step": each("b", "loader", "b, next(iter(other))", 2),
    "a step of nothing except looks": each("n", "range(8)", "next(iter(loader)), n"),
    "all of an epoch at once": each("b", "list(loader)", "b", 3),
    **cells("""
# %% a loop of ps.epochs
for epoch in ps.epochs(3):
    for i, b in enumerate(loader, 1):
        step(b, i)
    with torch.no_grad():
        for v in val:
            pass
# %% batches are left out
for epoch in range(3):
    for b in loader:
        if int(b) == 3:
            continue
        step(b)
# %% a loop is left
for epoch in range(3):
    for i, b in enumerate(loader):
        step(b, i)
        if i == 3:
            break
    with torch.no_grad():
        for v in val:
            break
# %% rounds of a `while`
for turn in range(2):
    n = 0
    while n < 12:
        for i, b in enumerate(loader):
            step(b, i, n)
            n += 1
        with torch.no_grad():
            for v in val:
                pass
note((turn, n))
# %% one `while` after another
n = 0
while n < 12:
    for b in loader:
        step(b, n)
        n += 1
    with torch.no_grad():
        for v in val:
            pass
n = 0
while n < 12:
    for b in loader:
        step(b, n)
        n += 1
    shown = next(iter(val))
note(n)
# %% a `while` counts in passes, and a `for` continues
n = 0
while n < 12:
    for i, b in enumerate(loader):
        step(b, i, n)
        n += 1
for epoch in range(3):
    for i, b in enumerate(loader):
        step(b, i, n)
        n += 1
note(n)
# %% passes of a `while` are left
n = best = 0
while n < 12:
    losses = []
    for i, b in enumerate(loader):
        step(b, i, n)
        losses.append(n)
        n += 1
        if n % 5 == 4:
            break
    best = max(best, sum(losses) / len(losses))
note((n, best))
# %% passes of a `while` are left in a function
def part(n):
    for b in tqdm(loader, disable=True):
        step(b, n)
        n += 1
        if n % 5 == 4:
            return n
    return n
n = 0
while n < 12:
    n = part(n)
note(n)
# %% passes of two loaders are left in a `while`
n = m = 0
while n + m < 20:
    for b, c in zip(loader, other):
        step(b, c, n)
        n += 1
        if n % 5 == 4:
            break
    for c in other:
        step(c, m)
        m += 1
        if m % 3 == 2:
            break
note((n, m))
# %% a number decides what follows
n = 0
while True:
    for b in loader:
        step(b, n)
        n += 1
    with torch.no_grad():
        for v in val:
            pass
    if n >= 18:
        break
for b in other:
    step(b, n)
note(n)
# %% gradients are accumulated from pass to pass
n = 0
for epoch in range(3):
    for b in loader:
        n += 1
        step(b, n, last=n % 4 == 0)
# %% zip
for epoch in range(3):
    for b, c in zip(loader, other):
        step(b, c)
    with torch.no_grad():
        for v in val:
            pass
# %% loaders in turn
for k, data in enumerate((loader, other)):
    for i, b in enumerate(data):
        step(b, k, i)
# %% the same loader again and again
for i, b in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
    if i >= 14:
        break
    step(b, i)
# %% one function for all
def train(batches):
    for b in batches:
        step(b)

train(loader)
train(itertools.islice(loader, 4))
# %% a generator that gives each batch twice
def twice(batches):
    for b in batches:
        yield b
        yield b

for i, b in enumerate(twice(loader)):
    step(b, i)
# %% a generator that ends early
def limited(batches, most):
    for i, b in enumerate(batches):
        if i >= most:
            return
        yield i, b

for epoch in range(3):
    for i, b in limited(loader, 4):
        step(b, i)
# %% a look before the loop
shown = next(iter(loader))
for epoch in range(3):
    for b in loader:
        step(b)
# %% iterators that are kept for looks
looks = iter(loader)
shown = next(looks)
for epoch in range(3):
    for b in loader:
        step(b)
    looks = iter(val)
    shown = next(looks)
# %% a look in the first step
for epoch in range(3):
    for i, b in enumerate(loader):
        step(b)
        if epoch == 0 and i == 0:
            next(iter(val))
    with torch.no_grad():
        for v in val:
            pass
# %% an evaluation in the body, and one after it
n = 0
for epoch in range(3):
    for b in loader:
        step(b)
        n += 1
        if n % 2 == 0:
            model.eval()
            with torch.no_grad():
                for v in val:
                    pass
            model.train()
    with torch.no_grad():
        for v in val:
            pass
# %% an evaluation by calls
for epoch in range(3):
    for b in loader:
        step(b)
    batches = iter(val)
    with torch.no_grad():
        model.eval()
        seen = [int(next(batches)) for _ in range(3)]
        model.train()
# %% other data beside, by calls
beside = iter(other)
for b in loader:
    step(b, next(beside))
# %% other data beside in each epoch
for epoch in ps.epochs(3):
    beside = iter(other)
    for b in loader:
        step(b, next(beside))
# %% now and then a batch of other data
extra = iter(other)
for epoch in range(2):
    for i, b in enumerate(loader):
        step(b)
        if i % 3 == 2:
            step(next(extra))
# %% a step after each pass
extra = iter(other)
for epoch in range(3):
    for b in loader:
        step(b)
    step(next(extra))
# %% a step after each pass of ps.epochs
extra = iter(other)
for epoch in ps.epochs(3):
    for b in loader:
        step(b)
    step(next(extra))
# %% two iterators in a while loop
one, two, n = iter(loader), iter(other), 0
while n < 6:
    step(next(one), next(two), n)
    n += 1
# %% an iterator that begins again by itself
class Batches:
    def __init__(self):
        self.at = iter(loader)

    def __next__(self):
        try:
            return next(self.at)
        except StopIteration:
            self.at = iter(loader)
            return next(self.at)

batches, n = Batches(), 0
while n < 14:
    step(next(batches), n)
    n += 1
# %% endless generators
def endless(data):
    while True:
        for b in data:
            yield b

one, two, n = endless(loader), endless(other), 0
while n < 14:
    step(next(one), next(two), n)
    n += 1
# %% endless generators through ps.epochs
def endless(data):
    while True:
        yield from data

one, two = endless(loader), endless(other)
for epoch in ps.epochs(4):
    for _ in range(4):
        step(next(one), next(two))
# %% a while loop around passes
n = 0
while n < 14:
    for b in loader:
        step(b, n)
        n += 1
        if n >= 14:
            break
# %% a while loop around calls
n = 0
while n < 14:
    batches = iter(loader)
    for _ in range(3):
        step(next(batches), n)
        n += 1
# %% functions
def evaluate(data):
    with torch.no_grad():
        for k, v in enumerate(data):
            if k == 1:
                return float(v)

def train(epoch):
    for i, b in enumerate(loader):
        step(b, i)
        if i == 2:
            evaluate(val)

for epoch in range(3):
    train(epoch)
    evaluate(val)
# %% a phase that reads all at once, before ps.epochs
n = 0
for b in list(loader):
    step(b, n)
    n += 1
for epoch in ps.epochs(2):
    for b in itertools.islice(loader, 4):
        step(b, n)
        n += 1
note(n)
# %% other data beside a zip, by calls
beside = iter(other)
for epoch in range(2):
    for b, c in zip(loader, other):
        step(b, c)
        step(next(beside))
        if int(c) % 2:
            beside = iter(other)
# %% gradients are accumulated from epoch to epoch
n = 0
for epoch in ps.epochs(3):
    for b in loader:
        if int(b) == 3:
            continue
        n += 1
        step(b, n, last=n % 2 == 0)
for b in loader:
    n += 1
    step(b, n, last=n % 2 == 0)
note(n)
# %% numbers of the data before ps.epochs
mean = count = 0
for b in loader:
    mean, count = mean + float(b), count + 1
    for v in val:
        pass
mean /= count
batches = iter(other)
for _ in range(2):
    mean += float(next(batches))
for epoch in ps.epochs(3):
    for i, b in enumerate(loader):
        step(b, i, mean * 100)
# %% a phase of another kind before ps.epochs
n = 0
for epoch in range(2):
    for b in list(loader):
        step(b, n)
        n += 1
        if n % 4 == 1:
            shown = next(iter(val))
for epoch in ps.epochs(2):
    for b in loader:
        step(b, n)
        n += 1
note(n)
# %% a phase with evaluations before ps.epochs
n = 0
for epoch in range(2):
    for b in loader:
        step(b, n)
        n += 1
        if n % 2 == 0:
            model.eval()
            with torch.no_grad():
                for v in val:
                    pass
            model.train()
for epoch in ps.epochs(2):
    for i, b in enumerate(other):
        step(b, i)
# %% a step after a phase, before ps.epochs
extra, n = iter(other), 0
for b in loader:
    step(b, n)
    n += 1
step(next(extra), n)
for epoch in ps.epochs(3):
    for b in itertools.islice(loader, 5):
        step(b, n)
        n += 1
note(n)
# %% two phases
for epoch in ps.epochs(2):
    for b in loader:
        step(b)
shown = next(iter(val))
for epoch in ps.epochs(2):
    for i, b in enumerate(other):
        step(b, i)
# %% a hidden state
hidden = torch.zeros(5)
for epoch in range(3):
    for b in loader:
        hidden = (hidden * 0.5 + b).detach()
        out = torch.full((9000,), float(b))
        step(b, 8 * hidden.sum(), out[0])
# %% a hidden state that begins with each epoch
out = None
for epoch in range(3):
    hidden = None
    for b in loader:
        hidden = b + (torch.zeros(5) if hidden is None else hidden * 0.5)
        out = torch.full((9000,), float(b))
        step(b, 8 * hidden.sum(), out[0])
# %% a wide hidden state in ps.state
state = ps.state(hidden=torch.zeros(9000))
for epoch in range(3):
    for b in loader:
        state.hidden = state.hidden * 0.5 + b
        step(b, 8 * state.hidden[0])
# %% lists are made one batch ahead
for epoch in range(3):
    batches = iter(loader)
    read = next(batches, None)
    following = None if read is None else [torch.ones(3) * read, torch.ones(2)]
    while following is not None:
        read = next(batches, None)
        made, following = following, None if read is None else [torch.ones(3) * read, torch.ones(2)]
        step(made[0][0])
# %% an order of each epoch
for epoch in range(3):
    order = torch.arange(9000).roll(epoch)
    for b in loader:
        step(b, order[int(b)])
# %% an order that each epoch draws
for epoch in ps.epochs(3):
    order = torch.randperm(9000)
    for b in loader:
        step(b, order[int(b)])
# %% two batches for each step
for epoch in ps.epochs(3):
    batches = iter(loader)
    for a, b in zip(batches, batches):
        step(a, b)
# %% two batches for each step, and the pass is not seen to end
for epoch in ps.epochs(3):
    batches = iter(loader)
    for _ in range(3):
        step(next(batches), next(batches))
# %% a batch is used again after its step
def twice():
    for b in loader:
        yield b
        yield b
n = 0
for epoch in ps.epochs(2):
    for b in twice():
        n += 1
        step(b, n, last=n % 3 == 0)
# %% gradients are accumulated over an evaluation
n = 0
for epoch in range(3):
    for b in loader:
        n += 1
        step(b, n, last=n % 4 == 0)
    with torch.no_grad():
        for v in val:
            pass
# %% two batches for each step, and the loop is left
for epoch in ps.epochs(3):
    batches = iter(loader)
    for a, b in zip(batches, batches):
        step(a, b)
        if epoch == 1:
            break
# %% batches of an iterator are used in the next epoch
for _ in range(2):
    for b in loader:
        step(b)
batches, waiting = iter(itertools.cycle(other)), []
for epoch in ps.epochs(3):
    for b in loader:
        if len(waiting) < 2:
            waiting += [next(batches), next(batches), next(batches)]
        step(b, waiting.pop(0))
# %% a curriculum in ps.state
state = ps.state(stage=0)
for epoch in ps.epochs(4):
    for b in loader if state.stage % 2 == 0 else other:
        step(b, state.stage)
    state.stage += 1
# %% what decides is between the passes
n = best = 0
for epoch in range(4):
    for b in loader:
        step(b, n)
        n += 1
        best = max(best, n)
    if n >= 12:
        break
# %% means of each pass, by functions
def trained():
    total, n = 0.0, 0
    for b in loader:
        step(b, n)
        total += float(b)
        n += 1
    return total / n
def evaluated():
    values = [float(v) for v in val]
    return sum(values) / len(values)
best = bad = 0
for epoch in range(4):
    mean = trained()
    best, bad = max(best, mean - epoch), bad + (best > mean - epoch)
    if bad > 2:
        break
note((round(best, 3), bad))
# %% lists of each pass
for epoch in range(3):
    losses, read = [], {"all": []}
    for b in loader:
        step(b, len(losses))
        losses.append(torch.tensor(float(b)))
        read["all"].append(int(b))
    note((float(torch.stack(losses).mean()), max(read["all"])))
# %% a tail that counts
state = ps.state(passes=0)
for epoch in range(4):
    for b in loader:
        step(b, state.passes)
    state.passes += 1
note(state.passes)
# %% steps are counted in ps.state
state = ps.state(n=0)
for epoch in ps.epochs(3):
    for b in loader:
        state.n += 1
        step(b, state.n)
"""),
}
REFUSED: Final = cells("""
# %% loaders in turn by a count of passes
which = 0
for epoch in range(4):
    for b in (loader, other)[which]:
        step(b)
    which = 1 - which
# %% a chain of loaders that is left
n = 0
for epoch in range(3):
    for b in itertools.chain(ps.shard(loader.loader), ps.shard(loader.loader)):
        n += 1
        step(b)
        if n % 4 == 0:
            break
# %% a wide hidden state
hidden = torch.zeros(9000)
for epoch in range(3):
    for b in loader:
        hidden = hidden * 0.5 + b
        step(b, 8 * hidden[0])
# %% a wide hidden state in an epoch of ps.epochs
for epoch in ps.epochs(3):
    hidden = torch.zeros(9000)
    for b in loader:
        hidden = hidden * 0.5 + b
        step(b, 8 * hidden[0])
# %% a batch is read for the next epoch
batches = iter(itertools.chain(loader, other))
following = next(batches)
for epoch in ps.epochs(3):
    for _ in range(4):
        b, following = following, next(batches)
        step(b)
# %% two iterators in one line
both = None
for epoch in ps.epochs(4):
    if both is None:
        both = [iter(loader), iter(other)]
    step(*[next(each) for each in both])
""")
"""Loops that a restart could not find again."""
SAYS: Final = {
    "a batch is read for the next epoch": "asked before ps.epochs began",
    "two iterators in one line": "was made in an epoch of ps.epochs, and continues in another one",
}
"""A part of the sentence, if the script itself is refused and not its restart."""


_COUNTING: Final = """
{beginning}
for epoch in range(2):
    for b in loader:
        step(b, {read})
        {change}
"""
_OWN: Final = "class Own:\n    n = 0\n"


def counting(beginning: str, read: str, change: str) -> str:
    """A script that counts its steps somewhere, and reads that in each."""
    return _COUNTING.format(beginning=beginning, read=read, change=change)


PUT_BACK: Final = {
    "an attribute of a class": counting(_OWN, "Own.n", "Own.n += 1"),
    "an attribute of a function": counting("def own(): pass\nown.n = 0", "own.n", "own.n += 1"),
    "a slot": counting("class Own:\n    __slots__ = 'n'\nown = Own()\nown.n = 0", "own.n", "own.n += 1"),
    "a variable that a function has taken along": counting(
        "def counter():\n    own = 0\n    def count():\n        nonlocal own\n        own += 1\n        return own\n    return count\n"
        "count = counter()",
        "count()", "pass",
    ),
    "objects in a dict and in a list": counting(
        f"{_OWN}own = {{'a': Own(), 'b': [Own()]}}", "own['a'].n + own['b'][0].n", "own['a'].n += 1; own['b'][0].n += 2"
    ),
    "a list that two share": counting("own = []\nothers = {'own': own}", "len(own)", "others['own'].append(1)"),
    "one of several objects": counting(
        f"{_OWN}owns = [Own(), Own()]\none = owns[0]", "one.n + 100 * owns[0].n", "one.n += 1; one = owns[epoch]"
    ),
    "a value that cannot change": counting(
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Own:\n    n: int\nown = Own(0)", "own.n", "own = Own(own.n + 1)"
    ),
    "a dict with a default of the script's own": counting(
        "import collections\nown = collections.defaultdict(lambda: 0)", "own['a']", "own['a'] += 1; own[epoch] += 1"
    ),
    "a fraction": counting("from fractions import Fraction\nown = Fraction()", "int(own)", "own += 1"),
    "a decimal": counting("from decimal import Decimal\nown = Decimal()", "int(own)", "own += 1"),
    "a path": counting("from pathlib import Path\nown = Path('0')", "int(own.name)", "own = own / str(int(own.name) + 1)"),
    "a moment": counting(
        "import datetime\nown = datetime.datetime(2026, 1, 1)", "own.day + len(str(own.date())) + own.time().hour",
        "own += datetime.timedelta(days=1)",
    ),
    "a span": counting("import datetime\nown = datetime.timedelta()", "own.days", "own += datetime.timedelta(days=1)"),
    "a frozen set": counting("own = frozenset()", "len(own)", "own |= {len(own)}"),
    "a shape": counting("own = torch.Size([])", "len(own)", "own = torch.Size([1, *own])"),
    "a range": counting("own = range(0)", "len(own)", "own = range(len(own) + 1)"),
    "texts in an array": counting("import numpy\nown = numpy.array(['0', '1'])", "int(own[0])", "own[0] = str(int(own[0]) + 1)"),
    "the object of a bound method": counting(
        "class Own:\n    n = 0\n    def add(self, more):\n        self.n += more\n        return self.n\nown = Own().add",
        "own(0)", "own(1)",
    ),
    "a default value": counting("def own(more, n=[0]):\n    n[0] += more\n    return n[0]", "own(0)", "own(1)"),
    "a list of a module": counting("own = torch.nn.Linear(1, 1)\nown.seen = []", "len(own.seen)", "own.seen.append(1)"),
    "another function": counting("def one(): return 1\ndef two(): return 2\nown = one", "own()", "own = one if own is two else two"),
}  # fmt: skip
"""What a record holds."""
LOST: Final = {
    "a named tuple": counting(
        "from typing import NamedTuple\nclass Own(NamedTuple):\n    n: int\nown = Own(0)", "own.n", "own = Own(own.n + 1)"
    ),
    "itertools.count": counting("own = itertools.count()", "next(own)", "pass"),
    "an iterator": counting("own = iter(list(range(20)))", "next(own)", "pass"),
    "a generator": counting("own = (n for n in range(20))", "next(own)", "pass"),
    "a generator function": counting("def rates():\n    for n in range(20): yield n\nown = rates()", "next(own)", "pass"),
    "a queue": counting("import queue\nown = queue.Queue()", "own.qsize()", "own.put(1)"),
    "fields in an array": counting("import numpy\nown = numpy.zeros(1, dtype=[('n', 'i4')])", "int(own['n'][0])", "own['n'] += 1"),
    "bytes": counting("own = bytearray(1)", "own[0]", "own[0] += 1"),
    "functools.partial": counting("from functools import partial\nown = partial(int, 0)", "own()", "own = partial(int, own() + 1)"),
    "a new object in a dict": counting(f"import collections\n{_OWN}own = collections.defaultdict(Own)", "own[0].n", "own[0].n += 1"),
    "a new object in a list": counting(f"{_OWN}own = [Own()]", "len(own)", "own.append(Own())"),
    "a key that is no text": counting(f"{_OWN}own = {{0: Own()}}", "own[0].n", "own[0].n += 1"),
    "deep within": counting(
        f"{_OWN}own = Own(); own.a = Own(); own.a.a = Own(); own.a.a.a = Own(); own.a.a.a.a = Own()", "own.a.a.a.a.n", "own.a.a.a.a.n += 1"
    ),
    "an optimizer that nobody attached": counting(
        "w = torch.zeros(1, requires_grad=True)\nown = torch.optim.SGD([w], lr=0.1)",
        "10 * own.param_groups[0]['lr']", "own.param_groups[0]['lr'] *= 2",
    ),
    "a weight that is trained beside": counting(
        "own = torch.zeros(1, requires_grad=True)", "8 * own.sum()",
        "(own.sum() * 1.0).backward(); own.data -= own.grad",
    ),
    "a model in a dict": counting("own = {'a': torch.nn.Linear(1, 1)}", "8 * own['a'].bias", "own['a'].bias.data += 1"),
}  # fmt: skip
"""What no record holds, so that a restart is refused."""

HEADS: Final = (
    ("b", "loader"),
    ("i, b", "enumerate(loader)"),
    ("i, b", "enumerate(tqdm(loader, disable=True), 1)"),
    ("b", "tqdm(loader, disable=True)"),
    ("b, c", "zip(loader, other)"),
    ("i, (b, c)", "enumerate(zip(other, loader))"),
    ("b", "itertools.islice(loader, 4)"),
    ("b", "list(loader)"),
    ("b, i", "zip(loader, range(50))"),
)
"""What a loop assigns, and what it goes over."""


@st.composite
def scripts(draw: Any) -> str:
    """A script of blocks that people put together in all ways."""
    some = lambda *which: draw(st.sampled_from(which))  # noqa: E731
    whether = lambda: draw(st.booleans())  # noqa: E731
    lines: list[str] = ["n = best = 0"]
    calls = draw(st.integers(0, 3)) == 0
    if calls:
        lines += ["extra = [iter(other)]", "def following():", "    try:", "        return next(extra[0])", "    except StopIteration:"]
        lines += ["        extra[0] = iter(other)", "        return next(extra[0])"]
    if whether():
        lines += [some("shown = next(iter(loader))", "kept = iter(val); shown = next(kept)", "for shown in val: break")]

    def evaluation(pad: str) -> list[str]:
        head = some("for v in val:", "for k, v in enumerate(val):")
        return [f"{pad}model.eval()", f"{pad}with torch.no_grad():", f"{pad}    {head}", f"{pad}        pass", f"{pad}model.train()"]

    def training(pad: str) -> list[str]:
        target, over = some(*HEADS)
        named = [name for name in ("b", "c", "i") if name in target]
        made = [f"{pad}for {target} in {over}:"]
        if draw(st.integers(0, 4)) == 0:
            made += [f"{pad}    if int(b) % 5 == 1:", f"{pad}        continue"]
        if calls and whether():
            named += ["following()"]
        last = some("", "", ", last=n % 2 == 1")
        made += [f"{pad}    step({', '.join(named)}, n{last})", f"{pad}    n += 1"]
        if draw(st.integers(0, 3)) == 0:
            made += [f"{pad}    if n % 3 == 0:", *evaluation(f"{pad}        ")]
        if draw(st.integers(0, 3)) == 0:
            made += [f"{pad}    if n % 4 == 1:", f"{pad}        shown = next(iter(val))"]
        if draw(st.integers(0, 3)) == 0:
            made += [f"{pad}    if n % 5 == 4:", f"{pad}        break"]
        if whether():
            made += [f"{pad}    best = max(best, n % 7)"]
        return made

    def body(pad: str) -> list[str]:
        made = training(pad)
        for _ in range(draw(st.integers(0, 2))):
            kind = draw(st.integers(0, 5))
            if kind < 2:
                made += evaluation(pad)
            elif kind == 2:
                made += [f"{pad}shown = next(iter(val))"]
            elif kind == 3 and calls:
                made += [f"{pad}step(following(), n)", f"{pad}n += 1"]
            elif kind == 4:
                made += training(pad)
            else:
                made += [f"{pad}best = max(best, n % 5)"]
        return made

    for _ in range(draw(st.integers(1, 2))):
        outer = some("for epoch in range(3):", "for epoch in ps.epochs(3):", "while n < 12:", "")
        if outer.startswith("while"):
            lines += ["n = 0"]
        lines += [outer, *body("    ")] if outer else body("")
        if whether():
            lines += evaluation("")
    return "\n".join([*lines, "note((n, best))"])
