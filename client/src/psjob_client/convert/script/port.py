"""The road of a script: text in, the text of a script that trains with psjob out, with what is left to its user, line by line."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

from psjob_client.convert.script import data, groups, guard, loops, tidy, wrapping
from psjob_client.convert.script.text import Text, applied
from psjob_client.convert.script.work import Remark, Work
from psjob_client.problems import BadInput

FOREIGN = {
    "tensorflow": "TensorFlow: psjob trains PyTorch models only; docs/coming/tfjob.md shows how such a script is written in PyTorch",
    "mxnet": "MXNet: psjob trains PyTorch models only; docs/port.md shows what takes the place of what",
    "jax": "JAX: psjob trains PyTorch models only",
    "paddle": "PaddlePaddle: psjob trains PyTorch models only",
    "deepspeed": "DeepSpeed, whose engine psjob has no place for: write the loop in PyTorch first",
    "accelerate": "Accelerate: three lines change by hand, which docs/accelerate.md shows",
    "lightning": "Lightning: two lines change by hand, which docs/lightning.md shows",
    "pytorch_lightning": "Lightning: two lines change by hand, which docs/lightning.md shows",
}
"""Packages whose scripts have no loop that is seen here."""
TRAINERS = frozenset({"transformers.Trainer", "transformers.Seq2SeqTrainer"})
RPC = "torch.distributed.rpc"
SPLITS = ("FullyShardedDataParallel", "fully_shard", "DeviceMesh", "init_device_mesh")


@dataclass(frozen=True)
class Ported:
    """A script as psjob trains it."""

    before: str
    after: str
    remarks: tuple[Remark, ...]
    """In the order of its lines."""

    @property
    def is_whole(self) -> bool:
        """Nothing is left to the user."""
        return not any(remark.by_hand for remark in self.remarks)

    def diff(self, name: str) -> str:
        """The edits as `patch` takes them."""
        lines = []
        for line in difflib.unified_diff(_lines(self.before), _lines(self.after), name, name):
            lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
        return "".join(lines)


def _lines(text: str) -> list[str]:
    """As patch counts them: at line feeds only."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def ported(script: str) -> Ported:
    """The script for DDP, Horovod or plain PyTorch as one for psjob.

    Raises:
        BadInput: it is no Python, or trains with something that no edit turns into psjob.
    """
    text = Text(script)
    work = Work.of(text)
    _refuse(work)
    for name, meant in work.names.uncertain():
        if any(full.startswith(("torch.distributed", "horovod")) or full.endswith("DistributedDataParallel") for full in meant):
            where = next((one for one in ast.walk(text.tree) if isinstance(one, ast.alias) and name in (one.asname, one.name)), text.tree)
            work.tell(where, f"{name} is imported and means something else too: what is done with it is left as it is")
    for subject in (groups, wrapping, data, loops, tidy):
        subject.convert(work)
    groups.tell_the_rest(work)
    if not work.edits and not work.removed:
        return Ported(script, script, tuple(sorted(work.remarks)))
    _saves(work)
    tidy.psjob_imported(work)
    after = applied(text, tidy.finished(work))
    guard.check(work, after)
    return Ported(script, after, tuple(sorted(work.remarks)))


def _refuse(work: Work) -> None:
    for node in ast.walk(work.text.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            modules = [] if isinstance(node, ast.ImportFrom) and node.level else modules
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed" and any(one.name == "rpc" for one in node.names):
                modules = [RPC]
            for module in modules:
                if module == RPC:
                    raise BadInput(f"line {node.lineno}: calls functions of other processes by {RPC}, which psjob has no place for")
                if why := FOREIGN.get(module.partition(".")[0]):
                    raise BadInput(f"line {node.lineno}: trains with {why}")
        elif isinstance(node, ast.Call):
            full = work.full(node.func)
            if full in TRAINERS:
                raise BadInput(
                    f"line {node.lineno}: trains with transformers' Trainer: two lines change by hand, which docs/transformers.md shows"
                )
            if full.startswith("torch.distributed.") and full.rpartition(".")[2] in SPLITS:
                raise BadInput(
                    f"line {node.lineno}: {work.text.of(node.func)} splits the model over processes, which no edit turns into psjob;"
                    " start from a script for one process (larger models: docs/pipelines.md)"
                )


def _saves(work: Work) -> None:
    saved = next((call for call in work.calls() if work.full(call.func) == "torch.save" and not work.is_gone(call)), None)
    if saved is not None:
        work.tell(
            saved,
            "torch.save: psjob keeps checkpoints of model, optimizer and place by itself; save only what you want as a file, where"
            " ps.is_first() is true",
            by_hand=False,
        )
