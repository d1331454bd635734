"""The road of a script: text in, the text of a script that trains with psjob out, with what is left to its user, line by line.

What a conversion has promised is checked on its result (`check`): a script that breaks one of these promises is not written.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from psjob_client.convert.script.groups import (
    convert_groups,
    convert_tidy,
    finished_edits,
    names_psjob,
    outside_functions,
    psjob_imported,
    tell_the_rest,
)
from psjob_client.convert.script.loops import convert_data, convert_loops, convert_wrapping
from psjob_client.convert.script.text import BY_HAND, ENDS_IN, Remark, ScriptEdits, Text, applied
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
Shape = tuple[object, ...]
ASSIGNED = (ast.Assign, ast.AnnAssign)
IMPORTS = (ast.Import, ast.ImportFrom)


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
    work = ScriptEdits.of(text)
    _refuse(work)
    for name, meant in work.names.uncertain():
        if any(full.startswith(("torch.distributed", "horovod")) or full.endswith("DistributedDataParallel") for full in meant):
            where = next((one for one in ast.walk(text.tree) if isinstance(one, ast.alias) and name in (one.asname, one.name)), text.tree)
            work.tell(where, f"{name} is imported and means something else too: what is done with it is left as it is")
    for convert in (convert_groups, convert_wrapping, convert_data, convert_loops, convert_tidy):
        convert(work)
    tell_the_rest(work)
    if not work.edits and not work.removed:
        return Ported(script, script, tuple(sorted(work.remarks)))
    _saves(work)
    psjob_imported(work)
    after = applied(text, finished_edits(work))
    check_promises(work, after)
    return Ported(script, after, tuple(sorted(work.remarks)))


def _refuse(work: ScriptEdits) -> None:
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


def _saves(work: ScriptEdits) -> None:
    saved = next((call for call in work.calls() if work.full(call.func) == "torch.save" and not work.is_gone(call)), None)
    if saved is not None:
        work.tell(
            saved,
            "torch.save: psjob keeps checkpoints of model, optimizer and place by itself; save only what you want as a file, where"
            " ps.is_first() is true",
            by_hand=False,
        )


def check_promises(work: ScriptEdits, after: str) -> None:
    """The new text is Python, has all that was put in, lost only what was taken out, and imports psjob before it is used.

    Raises:
        BadInput: it is not so, and the script has to be changed by hand.
    """
    try:
        tree = ast.parse(after.removeprefix("\ufeff"))
    except (SyntaxError, ValueError):
        raise BadInput(f"psjob could not convert it, as the result would be no Python; {BY_HAND}") from None
    added = Counter(ast.unparse(ast.parse(line)) for line in work.inserted)
    before, now = _told(work.text.tree, added), _told(tree, added)
    if any(now[line] < before[line] + count for line, count in added.items()):
        raise BadInput(f"psjob could not convert it, as a statement would be lost that has to come in; {BY_HAND}")
    if _shape(work.text.tree, added, work.removed) != _shape(tree, added, set()):
        raise BadInput(f"psjob could not convert it, as a statement of the script would be lost or moved; {BY_HAND}")
    if names_psjob(work) and not _is_imported(work, tree):
        raise BadInput(f"psjob could not convert it, as {work.ps} would be used before it is imported; {BY_HAND}")


def _told(tree: ast.Module, lines: Collection[str]) -> Counter[str]:
    return Counter(said for node in ast.walk(tree) if isinstance(node, ast.stmt) and (said := ast.unparse(node)) in lines)


def _shape(node: ast.AST, added: Collection[str], removed: set[ast.stmt]) -> Shape:
    """The kinds of statements that a node's blocks hold, in order, without those that came, went, or do nothing."""
    blocks = []
    for name, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt | ast.ExceptHandler | ast.match_case):
            held = tuple(
                (_kind(one), _shape(one, added, removed))
                for one in value
                if one not in removed and not isinstance(one, ast.Pass) and not (isinstance(one, ast.stmt) and ast.unparse(one) in added)
            )
            if held:
                blocks.append((name, held))
    return tuple(blocks)


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return f"{type(node).__name__} {node.name}"
    return "Assign" if isinstance(node, ASSIGNED) else type(node).__name__


def _is_imported(work: ScriptEdits, tree: ast.Module) -> bool:
    """psjob is imported at the head of the module, before all that names it."""
    for statement in outside_functions(tree.body):
        if isinstance(statement, IMPORTS):
            names = {alias.asname or alias.name: alias.name for alias in statement.names}
            if isinstance(statement, ast.Import) and names.get(work.ps) == ENDS_IN:
                return True
        elif any(isinstance(node, ast.Name) and node.id == work.ps for node in _own(statement)):
            return False
    return not any(isinstance(node, ast.Name) and node.id == work.ps for node in ast.walk(tree))


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement's nodes, without the blocks that are seen by themselves."""
    if isinstance(statement, ast.If):
        return ast.walk(statement.test)
    return iter(()) if isinstance(statement, ast.Try) else ast.walk(statement)
