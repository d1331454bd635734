"""What becomes of a script for DDP, Horovod or plain PyTorch, and what is told of the lines that are left as they are."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_client.cli.main import cli
from psjob_client.convert.script.port import ported
from psjob_client.convert.script.text import Edit
from psjob_client.problems import BadInput
from tests.support.typed import CliRunner
from tests.unit.convert_sources import DDP

HEAD = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
import torch.multiprocessing as mp
import horovod.torch as hvd
import os

"""
TAIL = """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x in loader:
        model(x).sum().backward()
        opt.step()
"""
DDP_AFTER = '''"""Trains."""

import torch
from torch.utils.data import DataLoader, TensorDataset
import psjob as ps


def main():
    loader = DataLoader(
        DATA,
        batch_size=8,
        shuffle=True,  # an order of its own
    )
    model = Net().to("cpu")
    opt = torch.optim.SGD(model.parameters(), lr=0.05)   # kept   as it is
    model, opt = ps.attach(model, opt)
    for epoch in ps.epochs(3):
        epoch += 1
        for i, (x, y) in enumerate(ps.shard(loader)):
            loss = (model(x) - y).square().mean()
            opt.zero_grad(); loss.backward(); opt.step()
        if ps.is_first():
            print(epoch, loss.item(), len(loader))
    torch.save(model.state_dict(), "w.pt")


main()
'''


def body(text: str) -> str:
    """Of a converted script: what is not an import."""
    return "\n".join(line for line in text.splitlines() if line and not line.startswith(("import ", "from ")))


def test_a_script_for_ddp_keeps_all_that_is_not_of_ddp() -> None:
    made = ported(DDP)
    assert made.after == DDP_AFTER
    assert made.is_whole
    told = {remark.line: remark.sentence for remark in made.remarks}
    assert "len(ps.shard(loader))" in told[35] and "spec" not in told[36] and "ps.is_first()" in told[36]


def test_what_was_converted_is_not_converted_again() -> None:
    after = ported(DDP).after
    again = ported(after)
    assert again.after == after and again.is_whole


def test_a_left_in_process_group_of_a_script_for_psjob_goes_alone() -> None:
    script = ported(DDP).after.replace("def main():\n", 'def main():\n    torch.distributed.init_process_group("gloo")\n')
    made = ported(script)
    assert made.after == ported(DDP).after and made.is_whole


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model = Net()\nhvd.init()", "model = Net()"),
        ("model = DDP(Net(), device_ids=[0])", "model = Net()"),
        ("model = DDP(a if b else c).train()", "model = (a if b else c).train()"),
        ("net = Net()\nmodel = DDP(module=net)", "net = Net()\nmodel = net"),
        ("model = Net(); hvd.init()", "model = Net(); pass"),
        ("model = Net()\nif dist.is_available():\n    dist.init_process_group()", "model = Net()"),
        ("model = Net()\ntry:\n    dist.init_process_group()\nfinally:\n    a()", "model = Net()\ntry:\n    pass\nfinally:\n    a()"),
        ("model = Net(dist.get_world_size())", "model = Net(ps.world())"),
        ('model = Net(int(os.environ["RANK"]))', "model = Net(ps.rank())"),
        ('model = Net(os.environ["WORLD_SIZE"])', "model = Net(str(ps.world()))"),
        ('model = Net(int(os.environ["LOCAL_RANK"]))', 'model = Net(int(os.environ.get("LOCAL_RANK", "0")))'),
        ('model = Net(int(os.getenv("RANK", -1)))', 'model = Net(int(os.getenv("RANK", -1)))'),
        ("model = Net(hvd.local_rank())", 'model = Net(int(os.environ.get("LOCAL_RANK", "0")))'),
        ("model = Net(hvd.rank() != 0)", "model = Net(not ps.is_first())"),
        ("model = Net(hvd.rank() == 1)", "model = Net(ps.rank() == 1)"),
        ("model = DDP(Net())\nmodel.module.eval()", "model = Net()\nmodel.eval()"),
        ("model = Net()\nmp.spawn(work, args=(1, 2), nprocs=2)", "model = Net()\nwork(ps.rank(), 1, 2)"),
        ("model = Net()\nmp.spawn(work, nprocs=2)", "model = Net()\nwork(ps.rank())"),
    ],
)  # fmt: skip
def test_a_line_becomes(before: str, after: str) -> None:
    made = ported(HEAD + before + "\nloader = DataLoader(d)" + TAIL)
    expected = f"{after}\nloader = DataLoader(d)" + TAIL.replace("range(3)", "ps.epochs(3)").replace("in loader", "in ps.shard(loader)")
    expected = expected.replace("lr=0.1)\n", "lr=0.1)\nmodel, opt = ps.attach(model, opt)\n")
    assert body(made.after) == body(expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(d, sampler=DistributedSampler(d))", "DataLoader(d, shuffle=True)"),
        ("DataLoader(d, sampler=DistributedSampler(d, shuffle=False), batch_size=4)", "DataLoader(d, batch_size=4)"),
        ("DataLoader(d, 4, sampler=DistributedSampler(d, shuffle=False))", "DataLoader(d, 4)"),
        ("DataLoader(d, shuffle=False, sampler=DistributedSampler(d))", "DataLoader(d, shuffle=True)"),
        ("DataLoader(d, sampler=DistributedSampler(d, shuffle=args.mix))", "DataLoader(d, shuffle=args.mix)"),
    ],
)
def test_a_sampler_becomes_an_order_of_the_loader(before: str, after: str) -> None:
    made = ported(f"{HEAD}model = Net()\nloader = {before}{TAIL}")
    assert f"loader = {after}\n" in made.after and made.is_whole


@pytest.mark.parametrize(
    ("loop", "after"),
    [
        ("for e in range(0, n):", "for e in ps.epochs(n):"),
        ("for e in range(1, n + 1):", "for e in ps.epochs(n):\n    e += 1"),
        ("for e in range(2, n):", "for e in ps.epochs(n - 2):\n    e += 2"),
        ("for e in range(1, a or b):", "for e in ps.epochs((a or b) - 1):\n    e += 1"),
        ("for e in range(1, 4):", "for e in ps.epochs(3):\n    e += 1"),
        ("for e in tqdm(range(n)):", "for e in tqdm(ps.epochs(n)):"),
    ],
)
def test_a_loop_over_epochs_becomes_one_that_goes_on(loop: str, after: str) -> None:
    made = ported(f"{HEAD}model = Net()\nloader = DataLoader(d){TAIL.replace('for epoch in range(3):', loop)}")
    assert f"\n{after}\n" in made.after and made.is_whole


def test_epochs_of_a_loop_count_as_before() -> None:
    """The numbers that the body sees are those of range, whatever the first is."""
    for first, last in ((0, 3), (1, 4), (2, 5), (3, 3)):
        text = f"{HEAD}model = Net()\nloader = DataLoader(d){TAIL.replace('range(3)', f'range({first}, {last})')}"
        made = ported(text)
        loop = next(node for node in ast.walk(ast.parse(made.after)) if isinstance(node, ast.For) and "epochs" in ast.unparse(node.iter))
        shown = ast.unparse(loop.iter)
        added = ast.unparse(loop.body[0]) if isinstance(loop.body[0], ast.AugAssign) else "epoch += 0"
        count = int(shown.removeprefix("ps.epochs(").removesuffix(")"))
        assert [number + int(added.removeprefix("epoch += ")) for number in range(count)] == list(range(first, last))


def test_the_loop_that_trains_is_found_behind_functions() -> None:
    script = textwrap.dedent("""
        import torch

        class Trainer:
            def batch(self, x):
                self.model(x).sum().backward()

            def one(self):
                for x in self.data:
                    self.batch(x)

            def fit(self, n):
                for epoch in range(n):
                    self.one()

            def test(self):
                for x in self.data:
                    self.model(x)

        def main():
            for fold in range(5):
                print(fold)
            model = Net()
            if adam:
                opt = torch.optim.Adam([{"params": model.a.parameters()}, {"params": model.b.parameters()}])
            else:
                opt = torch.optim.SGD(model.parameters())
            Trainer(model, opt).fit(3)
    """)
    made = ported(script)
    assert made.after.count("ps.shard(self.data)") == 1 and "for epoch in ps.epochs(n)" in made.after and "in range(5)" in made.after
    assert "        opt = torch.optim.SGD(model.parameters())\n    model, opt = ps.attach(model, opt)\n" in made.after
    assert [remark.sentence for remark in made.remarks] == ["self.data is taken for a DataLoader, as the loop over it trains"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("dist.all_reduce(loss)", "dist.all_reduce: psjob starts no process group"),
        ("g = dist.new_group([0])", "leave groups out"),
        ("with model.no_sync():\n    pass\nmodel = DDP(model)", "take the with statement off its body"),
        ("def f(net):\n    return net.module\nmodel = DDP(model)", "write net"),
        ("model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)", "SyncBatchNorm needs a process group"),
        ("s = DistributedSampler(d) if many else None", "give the DataLoader shuffle=True"),
        ("model.to(dist.get_rank())", "takes a rank for the number of a GPU"),
        ("mp.spawn(work, args=given)", "call the function itself"),
        ("host = os.environ['MASTER_ADDR']", "MASTER_ADDR is not set"),
        ("x = dist.init_process_group()", "is a part of a larger expression"),
        ("second = torch.optim.SGD(other.parameters())", "one of several optimizers"),
    ],
)
def test_what_is_not_converted_is_told_with_its_line(line: str, says: str) -> None:
    made = ported(f"{HEAD}model = Net()\nloader = DataLoader(d)\n{line}{TAIL}")
    found = [remark for remark in made.remarks if says in remark.sentence]
    assert found and found[0].by_hand and not made.is_whole
    assert found[0].line in range(12, 12 + line.count("\n") + 4)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import tensorflow as tf", "TensorFlow"),
        ("from accelerate import Accelerator", "docs/accelerate.md"),
        ("import transformers\ntransformers.Trainer(model).train()", "docs/transformers.md"),
        ("from torch.distributed.fsdp import FullyShardedDataParallel as F\nmodel = F(Net())", "splits the model"),
        ("import torch.distributed.rpc as rpc", "functions of other processes"),
        ("x = (", "is not Python"),
        ("x = '\0'", "is not Python"),
    ],
)
def test_what_no_edit_turns_into_psjob_is_refused(line: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        ported(f"{line}\n")


PLAIN = """import torch
model = Net()
opt = torch.optim.SGD(model.parameters())
"""
GROUP = PLAIN.replace("torch\n", "torch, torch.distributed as dist\n", 1)
HVD = PLAIN.replace("torch\n", "torch\nimport horovod.torch as hvd\n", 1)
DATA = PLAIN.replace("torch\n", "torch\nfrom torch.utils.data import DataLoader, DistributedSampler\n", 1)
TRAINS = "for x in loader:\n    model(x).sum().backward(); opt.step()\n"


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (GROUP + "def setup(): dist.init_process_group('nccl')\ndef run(init):\n    init()\n    train()\nrun(setup)\n",
         "def setup(): pass\ndef run(init):\n    init()\n    train()\nrun(setup)\n"),
        ("import torch\ndef main():\n    model = Net(); opt = torch.optim.SGD(model.parameters())\n    go()\n",
         "    model = Net(); opt = torch.optim.SGD(model.parameters()); model, opt = ps.attach(model, opt)\n    go()\n"),
        (PLAIN.replace("())\n", '()); USE = """\nusage\n"""\n'),
         'parameters()); model, opt = ps.attach(model, opt); USE = """\nusage\n"""\n'),
        (PLAIN.replace("import torch", "import os; import torch"), "import os; import torch; import psjob as ps\nmodel = Net()\n"),
        ("# made here\nmodel = Net()\nopt = Own(model.parameters())\nopt.zero_grad()\n",
         "# made here\nimport psjob as ps\n\nmodel = Net()\n"),
        (GROUP + "try:\n    go()\nfinally:\n    if dist.is_initialized():\n        dist.barrier()\n",
         "try:\n    go()\nfinally:\n    pass\n"),
        (GROUP + "class T:\n    def close(self):\n        if dist.get_rank() == 0: dist.barrier()\n",
         "class T:\n    def close(self):\n        pass\n"),
        (GROUP + "if a:\n    b()\nelif dist.is_initialized():\n    dist.barrier()\nc()\n", "if a:\n    b()\nc()\n"),
        ("import torch\nmodel = Net()\ndef main():\n    opt = torch.optim.SGD(model.parameters())\n    go(opt)\n",
         "    _, opt = ps.attach(model, opt)\n"),
        ("import torch\nmodel = Net()\ndef main():\n    global model\n    opt = torch.optim.SGD(model.parameters())\n",
         "    model, opt = ps.attach(model, opt)\n"),
        (DATA + "s = DistributedSampler(d)\nloader = DataLoader(d, sampler=s)\nfor e in range(1, n + 1):\n    # the sampler shuffles\n"
         "    s.set_epoch(e)\n    for x in loader:\n        model(x).backward()\n",
         "for e in ps.epochs(n):\n    e += 1\n    for x in ps.shard(loader)"),
        (DATA + "loader = DataLoader(d, sampler=DistributedSampler(d))\nfor e in range(3):\n    loader.sampler.set_epoch(e)\n"
         "    for x in loader:\n"
         "        model(x).backward()\n", "for e in ps.epochs(3):\n    for x in ps.shard(loader):\n"),
        (HVD + "if use:\n    opt = hvd.DistributedOptimizer(opt, op=hvd.Adasum)\nelse:\n    opt = hvd.DistributedOptimizer(opt)\n" + TRAINS,
         "if use:\n    pass\nelse:\n    pass\nmodel, opt = ps.attach(model, opt)\nfor x in ps.shard(loader)"),
        (HVD + "if hvd.size() > 1:\n    opt = hvd.DistributedOptimizer(opt)\n" + TRAINS,
         "())\nmodel, opt = ps.attach(model, opt)\nfor x in ps.shard"),
        ("import os\nrank = int(os.environ['RANK'])\nprint(rank)\n" + PLAIN,
         "import psjob as ps\nrank = ps.rank()\nprint(rank)\nimport torch\n"),
        (HVD + 'd = f"cuda:{hvd.local_rank()}"\n', "d = f\"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}\"\n"),
        (PLAIN + "for e in range(1, (n + 1)):\n    " + TRAINS.replace("\n   ", "\n       "), "for e in ps.epochs((n)):\n    e += 1\n"),
        (DATA + "s = DistributedSampler(d, shuffle=False)\nloader = DataLoader((d), sampler=s)\n", "loader = DataLoader((d))\n"),
        ("# -*- coding: latin-1 -*-\n" + GROUP + 'print("éé", dist.get_rank(), 1)\n', 'print("éé", ps.rank(), 1)\n'),
        ("import torch\ndef main():\n    import psjob as ps\n    ps.attach(a, b)\nprint(torch.distributed.get_rank())\n",
         "import psjob as ps\ndef main():\n"),
    ],
)  # fmt: skip
def test_an_edit_is_right_where_lines_are_unusual(script: str, lines: str) -> None:
    made = ported(script)
    ast.parse(made.after)
    assert lines in made.after and made.is_whole


@pytest.mark.parametrize(
    ("script", "line", "says"),
    [
        (PLAIN + "for e in range(3):\n    opt = torch.optim.SGD(model.parameters())\n    " + TRAINS.replace("\n   ", "\n       "),
         5, "is made in each turn of a loop"),
        (PLAIN + TRAINS + "opt = torch.optim.Adam(model.parameters())\n" + TRAINS, 6, "is made again behind what trains"),
        ("import torch\n_('x')\nmodel = Net()\ndef main():\n    opt = torch.optim.SGD(model.parameters())\n", 5, "is a name of the module"),
        (DATA + "loader = DataLoader(d, sampler=DistributedSampler(d))\nprint(len(loader.sampler))\n", 6, "loader.sampler"),
        (DATA + "a = DataLoader(d, sampler=DistributedSampler(d))\nb = DataLoader(d, sampler=Own(d))\nb.sampler.set_epoch(1)\n", 7,
         "b.sampler"),
        ("import torch\nimport horovod.torch as hvd\ndef wrap(model, opt):\n    if hvd.size() > 1:\n"
         "        opt = hvd.DistributedOptimizer(opt, model.named_parameters())\n", 5, "in some cases only"),
        (PLAIN + "def run(loader, train):\n    for x in loader:\n        if train: model(x).backward()\nrun(a, True)\nrun(b, False)\n",
         5, "is called for a and b: write ps.shard"),
    ],
)  # fmt: skip
def test_what_no_edit_does_rightly_is_left_and_told(script: str, line: int, says: str) -> None:
    made = ported(script)
    assert [one.line for one in made.remarks if one.by_hand and says in one.sentence] == [line] and not made.is_whole


def test_the_result_is_checked_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes a wrong edit: nothing of it is written."""
    for wrong, says in (
        (lambda work: work.replace(work.text.tree.body[1], "model = ("), "no Python"),
        (lambda work: work.replace(work.text.tree.body[1], "pass"), "would be lost or moved"),
        (lambda work: work.replace(work.text.tree.body[-1], "pass"), "would be lost or moved"),
        (lambda work: work.inserted.append("e += 1"), "that has to come in"),
        (lambda work: work.edits.extend([Edit(3, 9, "x"), Edit(5, 12, "y")]), "line 1: psjob could not convert it, as two of its edits"),
        (lambda work: work.edits.append(Edit(0, 0, "ps.rank()\n")), "lost or moved"),
    ):
        with monkeypatch.context() as patched, pytest.raises(BadInput, match=says):
            patched.setattr("psjob_client.convert.script.port._saves", wrong)
            ported(PLAIN.replace("SGD(", "SGD(\n    ") + "go()\n")


def test_psjob_is_not_used_above_the_import_of_a_script() -> None:
    with pytest.raises(BadInput, match="ps would be used before it is imported"):
        ported(GROUP + "print(dist.get_rank())\nimport psjob as ps\n")


def test_a_diff_counts_lines_as_patch_does() -> None:
    made = ported(PLAIN.replace("Net()", "Net('\x0c\u2028')"))
    assert " model = Net('\x0c\u2028')\n" in made.diff("t.py") and made.diff("t.py").startswith("--- t.py\n+++ t.py\n@@ -1,3 +1,5 @@\n")


def test_a_name_that_means_two_things_is_left_alone() -> None:
    script = HEAD.replace("import horovod.torch as hvd", "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None")
    made = ported(f"{script}hvd.init()\nmodel = Net()\nloader = DataLoader(d){TAIL}")
    assert "hvd.init()" in made.after and any("hvd is imported and means something else" in one.sentence for one in made.remarks)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_marks_and_letters_of_any_language_stay(end: str, mark: str) -> None:
    before = mark + DDP.replace("\n", end).replace("# kept   as it is", "# größe 模型 🧮")
    after = ported(before).after
    assert after == mark + ported(DDP).after.replace("\n", end).replace("# kept   as it is", "# größe 模型 🧮")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mixture_of_lines_is_python_afterwards_and_settled(data: st.DataObject) -> None:
    """Whatever stands together: the result is parsed, and a second conversion changes nothing more."""
    lines = [
        "dist.init_process_group()", "model = DDP(model)", "if x:\n    hvd.init()", "rank = dist.get_rank()", "s = DistributedSampler(d)",
        "loader = DataLoader(d, sampler=s)", "opt = torch.optim.SGD(model.parameters())", "print(rank == 0, hvd.size())",
        "for e in range(1, n):\n    for x in loader:\n        s.set_epoch(e)\n        model(x).backward()", "def f():\n    hvd.shutdown()",
        "f()",
        "opt = hvd.DistributedOptimizer(opt)", "", "# Horovod: a comment", "model = Net()", "mp.spawn(f, args=(hvd.rank(),))",
        "if dist.get_rank() == 0: print(1)", "a = 1; dist.barrier()", "model.module.x = len(s)",
    ]  # fmt: skip
    chosen = data.draw(st.lists(st.sampled_from(lines), max_size=12))
    after = ported(HEAD + "\n".join(chosen) + data.draw(st.sampled_from(["", "\n"]))).after
    ast.parse(after)
    assert ported(after).after == after


def test_a_diff_is_shown_and_nothing_is_written(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DDP)
    shown = CliRunner().invoke(cli, ["convert", str(script)])
    assert shown.exit_code == 0 and shown.stdout == ported(DDP).diff(str(script)) and "nothing was written" in shown.stderr
    assert script.read_text() == DDP and shown.stdout.count("\n+    model, opt = ps.attach(model, opt)\n") == 1


def test_scripts_are_written_in_place_or_beside(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text(DDP)
    assert CliRunner().invoke(cli, ["convert", str(one), "--save", str(two)]).exit_code == 0
    assert (one.read_text(), two.read_text()) == (DDP, ported(DDP).after)
    done = CliRunner().invoke(cli, ["convert", "--write", str(one)])
    assert done.exit_code == 0 and done.stdout == "" and one.read_text() == two.read_text()
    again = CliRunner().invoke(cli, ["convert", "--write", str(one)])
    assert again.exit_code == 0 and "nothing to change" in again.stderr and one.read_text() == two.read_text()


def test_what_is_left_to_the_user_is_an_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DDP.replace("    dist.destroy", "    dist.all_reduce(loss)\n    dist.destroy"))
    shown = CliRunner().invoke(cli, ["convert", str(script)])
    assert shown.exit_code == 1
    assert f"left to you:\n  {script}:37: dist.all_reduce: psjob starts no process group" in shown.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gone.py"], "gone.py: cannot be read"),
        (["a.py", "job.yaml"], "a.py: is a script and stands beside manifests"),
        (["a.py", "b.py", "--save", "c.py"], "names one file for 2 scripts"),
        (["a.py", "--write", "--save", "c.py"], "one of the two"),
        (["--write", "job.yaml"], "--write: is for scripts"),
        (["a.py", "--image", "x"], "--image: is for manifests"),
    ],
)
def test_a_wrong_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(DDP)
    done = CliRunner().invoke(cli, ["convert", *words])
    assert isinstance(done.exception, BadInput) and says in str(done.exception)
    assert (tmp_path / "a.py").read_text() == DDP and not (tmp_path / "c.py").exists()
