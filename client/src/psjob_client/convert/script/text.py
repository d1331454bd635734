"""The text of a script under conversion: what is edited, what is taken out (`Work`), and what is said about the rest.

Edits are spans of the text and what takes their place. An edit inside another one that is larger goes with it. Comments and formatting are
never parsed, so they cannot be lost. Names mean what their imports say, unless they are bound elsewhere too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from psjob_client.problems import BadInput

HOROVOD, GROUP = "horovod.torch", "torch.distributed"
COMPOUND = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match,
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
)  # fmt: skip
"""Statements that no other one shares a line with."""
STALE = re.compile(r"#.*(horovod|hvd|\bddp\b|distribut|process group|init_process|broadcast|\bsampler|\bwrap|\brank)", re.IGNORECASE)
"""A comment that goes with the statement below it."""
BY_HAND = "nothing was written: change the script by hand, as docs/port.md says"
ENDS_IN = "psjob"


class Names:
    """The names of one script."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports: dict[str, set[str]] = defaultdict(set)
        """What a local name was imported as, in full."""
        self.bound: dict[str, list[ast.AST]] = defaultdict(list)
        """Where a name is bound but by an import."""
        self.loads: dict[str, list[ast.Name]] = defaultdict(list)
        for node in ast.walk(tree):
            self._see(node)

    def _see(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.asname or alias.name.partition(".")[0]].add(alias.name if alias.asname else alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imports[alias.asname or alias.name].add(f"{'.' * node.level}{node.module or ''}.{alias.name}")
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.loads[node.id].append(node)
            else:
                self.bound[node.id].append(node)
        elif isinstance(node, ast.arg):
            self.bound[node.arg].append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            self.bound[node.name or ""].append(node)

    def full(self, node: ast.AST | None) -> str:
        """The full name that an expression stands for, such as `torch.distributed.barrier`; empty where that is not certain."""
        if isinstance(node, ast.Attribute):
            of = self.full(node.value)
            return f"{of}.{node.attr}" if of else ""
        if isinstance(node, ast.Name) and node.id not in self.bound:
            meant = self.imports.get(node.id, set())
            return next(iter(meant)) if len(meant) == 1 else ""
        return ""

    def uncertain(self) -> Iterator[tuple[str, set[str]]]:
        """Names that are imported and mean other things as well."""
        for name, meant in self.imports.items():
            if len(meant) > 1 or name in self.bound:
                yield name, meant


class OverlappingEdits(ValueError):
    """Two edits overlap in part."""

    def __init__(self, at: int) -> None:
        super().__init__(f"edits overlap at byte {at}")
        self.at = at


@dataclass(frozen=True, order=True)
class Edit:
    """Bytes `start` to `end` become `text`."""

    start: int
    end: int
    text: str = ""


class Text:
    """A script that was parsed. Places are bytes of its UTF-8, as ast counts them."""

    def __init__(self, text: str) -> None:
        self.mark = "\ufeff" if text.startswith("\ufeff") else ""
        try:
            self.raw = text.removeprefix("\ufeff").encode()
            self.tree = ast.parse(text.removeprefix("\ufeff"))
        except (SyntaxError, ValueError) as error:
            at = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
            what = error.msg if isinstance(error, SyntaxError) else str(error)
            raise BadInput(f"{at}is not Python that can be read here: {what}; correct it first") from None
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.newline = "\r\n" if b"\r\n" in self.raw else "\n"

    def span(self, node: ast.AST) -> tuple[int, int]:
        """If a node stands, without what is around it in parentheses."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword | ast.alias | ast.arg)
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.decorator_list:
            start = min(start, self.line_of(node.decorator_list[0])[0])
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def whole(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        """If an operand or an argument stands, with the parentheses around it."""
        start, end = self.span(node)
        above = self.parents[node]
        if isinstance(node, ast.keyword) or not isinstance(above, ast.expr):
            return start, end
        least, most = self.span(above)
        if isinstance(above, ast.Call) and node is not above.func:
            least, most = self.raw.index(b"(", self.whole(above.func)[1]) + 1, most - 1
        elif isinstance(above, ast.Tuple | ast.List):
            least, most = least + 1, most - 1
        while True:
            before, after = self.raw[least:start].rstrip(), self.raw[end:most]
            if not before.endswith(b"(") or not after.lstrip().startswith(b")"):
                return start, end
            start, end = least + len(before) - 1, end + after.index(b")") + 1

    def of(self, node: ast.AST) -> str:
        """The node as it is written."""
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def is_placed(self, node: ast.AST) -> bool:
        """The node is where ast says: Python before 3.12 errs inside f-strings of several lines."""
        if not isinstance(node, ast.expr) or not any(isinstance(owner, ast.JoinedStr) for owner in self.owners(node)):
            return True
        try:
            return ast.dump(ast.parse(self.of(node), mode="eval").body) == ast.dump(node)
        except (SyntaxError, ValueError):
            return False

    def line_of(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """From the first byte of the node's first line to behind its last line's end."""
        assert node.end_lineno is not None
        first = node.lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.decorator_list:
            first = node.decorator_list[0].lineno
        return self._starts[first - 1], self._starts[node.end_lineno]

    def owners(self, node: ast.AST) -> Iterator[ast.AST]:
        """What the node stands in, the nearest first."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def statement(self, node: ast.AST) -> ast.stmt:
        """The nearest statement that the node is, or is a part of."""
        return next(one for one in (node, *self.owners(node)) if isinstance(one, ast.stmt))

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that the node stands in."""
        scopes = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.Module
        return next(one for one in self.owners(node) if isinstance(one, scopes))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of which this is one."""
        owner = self.parents[statement]
        for _, value in ast.iter_fields(owner):
            if isinstance(value, list) and statement in value:
                return value
        raise AssertionError(f"line {statement.lineno} stands in no block")

    def is_elif(self, statement: ast.stmt) -> bool:
        """It is an `elif` of another statement."""
        return isinstance(statement, ast.If) and self.raw[self.span(statement)[0] :].startswith(b"elif")

    def starts_its_line(self, statement: ast.stmt) -> bool:
        """Only white space stands before the statement in its line."""
        start = self.span(statement)[0]
        return not self.raw[self.line_of(statement)[0] : start].strip()

    def has_its_lines(self, statement: ast.stmt) -> bool:
        """Nothing else stands in the statement's lines, but for a comment."""
        after = self.raw[self.span(statement)[1] : self.line_of(statement)[1]].strip()
        return self.starts_its_line(statement) and (not after or after.startswith(b"#"))

    def indent(self, statement: ast.stmt) -> str:
        """White space before the statement."""
        start = self.line_of(statement)[0]
        return self.raw[start : self.span(statement)[0]].decode() if self.starts_its_line(statement) else ""

    def below(self, statement: ast.stmt, lines: Iterable[str]) -> Edit:
        """Statements behind a statement, in its block: in lines of their own, or in its line if others stand there too."""
        if not isinstance(statement, COMPOUND) and not self.has_its_lines(statement):
            end = self.span(statement)[1]
            return Edit(end, end, "".join(f"; {line}" for line in lines))
        end = self.line_of(statement)[1]
        gap = "" if self.raw[:end].endswith((b"\n", b"\r")) else self.newline
        return Edit(end, end, gap + "".join(f"{self.indent(statement)}{line}{self.newline}" for line in lines))

    def without(self, statement: ast.stmt) -> Edit:
        """Take a statement out, with the comment above it that speaks of it; `pass` where its line holds others."""
        if not self.has_its_lines(statement):
            return Edit(*self.span(statement), "pass")
        start, end = self.line_of(statement)
        before = self.raw[:start].splitlines(keepends=True)
        while before and before[-1].strip().startswith(b"#") and STALE.search(before[-1].decode()):
            start -= len(before.pop())
        below = self.raw[end:].splitlines(keepends=True)[:1]
        while (not below or not below[0].strip()) and before and not before[-1].strip():
            start -= len(before.pop())
        return Edit(start, end)

    def unwrapped(self, call: ast.Call, inner: ast.expr) -> list[Edit]:
        """`f(inner, …)` becomes `inner`, which may hold edits of its own."""
        (start, end), (first, last) = self.span(call), self.span(inner)
        plain = isinstance(inner, ast.Name | ast.Attribute | ast.Call | ast.Subscript) and b"\n" not in self.raw[first:last]
        return [Edit(start, first, "" if plain else "("), Edit(last, end, "" if plain else ")")]

    def without_argument(self, call: ast.Call, given: ast.keyword) -> Edit:
        """Take an argument out of a call, with its comma."""
        every: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        spans = sorted(map(self.whole, every))
        start, end = self.whole(given)
        at = spans.index((start, end))
        if at + 1 < len(spans):
            return Edit(start, spans[at + 1][0])
        return Edit(spans[at - 1][1], end) if at else Edit(start, end)


def applied(text: Text, edits: Iterable[Edit]) -> str:
    """The text with all edits.

    Raises:
        BadInput: two edits overlap in part.
    """
    made, at = [], 0
    try:
        kept = outermost(edits)
    except OverlappingEdits as overlap:
        line = text.raw[: overlap.at].count(b"\n") + 1
        raise BadInput(f"line {line}: psjob could not convert it, as two of its edits meet there; {BY_HAND}") from None
    for edit in kept:
        made += [text.raw[at : edit.start].decode(), edit.text]
        at = edit.end
    return text.mark + "".join(made) + text.raw[at:].decode()


def outermost(edits: Iterable[Edit]) -> list[Edit]:
    """In the order of the text, without those that lie inside a larger one. Whole lines that come into a removal take its place."""
    kept: list[Edit] = []
    for edit in sorted(set(edits), key=lambda one: (one.start, one.end > one.start, -one.end, one.text)):
        last = kept[-1] if kept else None
        if last is None or edit.start >= last.end:
            kept.append(edit)
        elif edit.end > last.end:
            raise OverlappingEdits(edit.start)
        elif edit.start == edit.end and edit.text.endswith("\n") and (not last.text or last.text.endswith("\n")):
            kept[-1] = Edit(last.start, last.end, last.text + edit.text)
    return kept


def covers(edits: Iterable[Edit], span: tuple[int, int]) -> bool:
    """Does one of the edits take out all of the span?"""
    return any(edit.start <= span[0] and span[1] <= edit.end for edit in edits)


@dataclass(frozen=True, order=True)
class Remark:
    """A sentence about a line of the script."""

    line: int
    sentence: str
    by_hand: bool = True
    """The script does not train with psjob until the user has changed this himself."""


@dataclass
class ScriptEdits:
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
    def of(cls, text: Text) -> ScriptEdits:
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
