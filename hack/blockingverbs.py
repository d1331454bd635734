"""The verbs of `Client` and `Job` in blocking.py and job.py of client/src/psjob_client/sdk, made from those of AsyncClient and AsyncJob.

Each has the signature of the asyncio verb and a docstring of its own. A verb of `Job` is promised by the one of AsyncClient, less the name.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "client/src/psjob_client/sdk"
FILES = (SDK / "blocking.py", SDK / "job.py")
MARK = re.compile(r"(    # -- generated: (\w+) -+\n)(.*?)(    # -- end -+\n)", re.DOTALL)
OWN = {"Client": ("place",), "Job": ("wait", "phase", "manifest", "save")}
"""Verbs that are not made: they are no user's, or are written by hand."""
JOB = re.compile(r'\bclient\.(\w+)\("digits"(?:, )?')
INDENT = " " * 4

Function = ast.FunctionDef | ast.AsyncFunctionDef


def texts() -> dict[Path, str]:
    """The whole files, with the verbs as they have to be."""
    client = _verbs("client.py", "AsyncClient")
    verbs = {"Client": client, "Job": _verbs("client.py", "AsyncJob")}

    def made(match: re.Match[str]) -> str:
        kind = match[2]
        parts = [_verb(verb, kind, _doc(verb, kind, client)) for name, verb in verbs[kind].items() if name not in OWN[kind]]
        return f"{match[1]}\n" + "\n".join(parts) + f"\n{match[4]}"

    return {path: _laid_out(path, MARK.sub(made, path.read_text())) for path in FILES}


def _laid_out(path: Path, code: str) -> str:
    words = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(path), "-"]
    return subprocess.run(words, input=code, capture_output=True, text=True, check=True).stdout


def _verbs(file: str, kind: str) -> dict[str, Function]:
    """The public methods of a class, by name."""
    tree = ast.parse((SDK / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    return {node.name: node for node in found.body if isinstance(node, Function) and not node.name.startswith("_")}


def _doc(verb: Function, kind: str, client: dict[str, Function]) -> str:
    doc = ast.get_docstring(verb if kind == "Client" else client[verb.name]) or ""
    if kind == "Job":
        doc = re.sub(r"^ +name: As for `get`.*\n|^ +name: Of the job.*\n(?: {8}.*\n)*", "", doc, flags=re.MULTILINE)
        doc = JOB.sub(r"job.\1(", re.sub(r"^Args:\n\n", "", doc, flags=re.MULTILINE)).replace("client.checkpoint(", "job.checkpoint(")
        doc = re.sub(r"^ +NoSuchJob: There is none.*\n", "    NoSuchJob: It has been deleted.\n", doc + "\n", flags=re.MULTILINE).rstrip()
    return doc


def _verb(verb: Function, kind: str, doc: str) -> str:
    """One method."""
    takes = verb.args
    made = isinstance(verb, ast.FunctionDef)  # local and kube: they make a client
    assert made == any(ast.unparse(one) == "classmethod" for one in verb.decorator_list) and not takes.vararg and not takes.kwarg
    returns = ast.unparse(verb.returns) if verb.returns else "None"
    wrapped = returns == "AsyncJob"
    returns = "Job" if wrapped else re.sub(r"^AsyncIterator\b", "Iterator", returns)
    given = ", ".join([*(one.arg for one in takes.args[1:]), *(f"{one.arg}={one.arg}" for one in takes.kwonlyargs)])
    call = f"{'AsyncClient' if made else 'self._core'}.{verb.name}({given})"
    if made:
        body = f"return cls({call})"
    elif returns.startswith("Iterator["):
        body = f"return iterate({call})"
    else:
        body = f"{'' if returns == 'None' else 'return '}{f'Job(run({call}))' if wrapped else f'run({call})'}"
    lines = [f"{INDENT}@classmethod"] if made else []
    lines.append(f"{INDENT}def {verb.name}({', '.join(_parameters(takes))}) -> {returns}:")
    own = doc.splitlines()
    lines += [f'{INDENT * 2}"""{own[0]}', *(f"{INDENT * 2}{line}".rstrip() for line in own[1:])]
    lines[-1:] = [f'{lines[-1]}"""'] if len(own) == 1 else [lines[-1], f'{INDENT * 2}"""']
    lines += [] if made else [f"{INDENT * 2}__tracebackhide__ = True"]
    return "\n".join([*lines, f"{INDENT * 2}{body}"]) + "\n"


def _parameters(takes: ast.arguments) -> Iterator[str]:
    free = len(takes.args) - len(takes.defaults)
    for number, one in enumerate(takes.args):
        yield _parameter(one, takes.defaults[number - free] if number >= free else None)
    if takes.kwonlyargs:
        yield "*"
    for one, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True):
        yield _parameter(one, default)


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(one.annotation)}" if one.annotation else ""
    value = "" if default is None else ast.unparse(default)
    return f"{one.arg}{kind}" + (f" = {value}" if value and kind else f"={value}" if value else "")
