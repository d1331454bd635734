"""What the names of a script mean: imports, and where else a name is bound."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

HOROVOD, GROUP = "horovod.torch", "torch.distributed"


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
