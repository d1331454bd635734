"""A conversion in the making: what is edited, what is taken out, and what is said about the rest."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from psjob_client.convert.script.text import Edit, Names, Text, covers

ENDS_IN = "psjob"


@dataclass(frozen=True, order=True)
class Remark:
    """A sentence about a line of the script."""

    line: int
    sentence: str
    by_hand: bool = True
    """The script does not train with psjob until the user has changed this himself."""


@dataclass
class Work:
    """One script."""

    text: Text
    names: Names
    ps: str = "ps"
    """What the script calls psjob."""
    edits: list[Edit] = field(default_factory=list)
    removed: set[ast.stmt] = field(default_factory=set)
    remarks: set[Remark] = field(default_factory=set)
    inserted: list[str] = field(default_factory=list)
    """Statements that come in beside those that were there."""
    imports: set[str] = field(default_factory=set)
    """Lines that have to stand among the imports."""
    seen: set[ast.AST] = field(default_factory=set)
    """Uses of torch.distributed and Horovod that were dealt with, or told of."""

    @classmethod
    def of(cls, text: Text) -> Work:
        """With nothing changed."""
        names = Names(text.tree)
        ours = [name for name, meant in names.imports.items() if meant == {ENDS_IN} and name not in names.bound]
        taken = "ps" in names.imports or "ps" in names.bound
        return cls(text, names, ours[0] if ours else ENDS_IN if taken else "ps")

    def replace(self, node: ast.AST, text: str) -> None:
        """Write something else for a node."""
        if not self.text.is_placed(node):
            self.tell(node, f"{ast.unparse(node)}: stands in an f-string that no edit is made in: give it a name before, and use that")
            return
        self.edits.append(Edit(*self.text.span(node), text))
        self.seen.update(ast.walk(node))

    def remove(self, statement: ast.stmt) -> None:
        """Take a statement out."""
        self.removed.add(statement)

    def tell(self, node: ast.AST, sentence: str, *, by_hand: bool = True) -> None:
        """Tell of a node's line."""
        self.remarks.add(Remark(getattr(node, "lineno", 1), sentence, by_hand))
        self.seen.update(ast.walk(node))

    def full(self, node: ast.AST | None) -> str:
        """The full name of what a node stands for; empty where that is not certain."""
        return self.names.full(node)

    def calls(self) -> list[ast.Call]:
        """Every call of the script."""
        return [node for node in ast.walk(self.text.tree) if isinstance(node, ast.Call)]

    def is_gone(self, node: ast.AST) -> bool:
        """Is the node no part of the new text?"""
        if any(owner in self.removed for owner in (node, *self.text.owners(node))):
            return True
        return covers([edit for edit in self.edits if edit.end > edit.start], self.text.span(node))

    def stands_alone(self, call: ast.Call) -> ast.Expr | None:
        """The statement that is this call and no more."""
        above = self.text.parents[call]
        return above if isinstance(above, ast.Expr) else None

    def only_value(self, name: str) -> ast.expr | None:
        """What a name is assigned, if it is bound once in the whole script, by a plain assignment."""
        bound = self.names.bound.get(name, [])
        if len(bound) != 1 or name in self.names.imports:
            return None
        target, value = assigned(self.text.parents[bound[0]])
        return value if target is bound[0] else None


def assigned(statement: ast.AST | None) -> tuple[ast.expr | None, ast.expr | None]:
    """Target and value of an assignment to one place; None twice for all else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0], statement.value
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return statement.target, statement.value
    return None, None


def keyword(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """An argument by its name, or by its place."""
    found = next((given.value for given in call.keywords if given.arg == name), None)
    if found is None and place is not None and len(call.args) > place and not any(isinstance(arg, ast.Starred) for arg in call.args):
        return call.args[place]
    return found


def constant(node: ast.AST | None) -> object:
    """The value of a literal; the type of the node where it is none."""
    return node.value if isinstance(node, ast.Constant) else type(node)
