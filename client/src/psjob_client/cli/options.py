"""What commands share: options, what a shell completes of them, and help texts as they are printed.

Which jobs a verb means (`Where`): a name of a run in ./.psjob means that run, and every other name a job of the cluster. `--local` and
`--folder` always mean this machine; `--namespace`, `--context`, `--kubeconfig` and `kubectl psjob` always mean the cluster.

A `ScriptCommand` takes a script in place of a manifest: `psjob run train.py --workers 4 -- --lr 0.1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from psjob_client.jobs.runs import LocalJobs
from psjob_client.local.manifest import PYTHONS
from psjob_client.problems import BadInput
from psjob_client.sdk.client import AsyncClient
from psjob_operator.contract import MODES

T = TypeVar("T")
KUBECTL = "kubectl"
COMPLETION_SECONDS = 2.0
OneOf = "use one of the two"
SUFFIX = ".py"
LIKELY, SURE = 0.6, 0.85
"""How alike two options are, of which one may be the other misspelt."""
LAUNCHERS = PYTHONS | {"torchrun"}
FIELDS = {
    "workers": "spec.workers.replicas",
    "shards": "spec.shards.replicas",
    "mode": "spec.training.mode",
    "image": "spec.workers.template.spec.containers[0].image",
}
OF_PODS = "template"
"""A pod's template has thousands of fields, which `kubectl explain` knows."""
Workers = Annotated[int | None, typer.Option(metavar="N", help="Number of workers; of a script 2 if absent.")]
Shards = Annotated[int | None, typer.Option(metavar="N", help="Number of shards; of a script 1 if absent.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT.py is the name of a module, as in python -m.")]
STARTS = ("psjob ", "kubectl ")
"""Of a line that is an example."""
GOES_ON = " \\"
"""At the end of a line, for a shell."""


@dataclass(frozen=True)
class JobScope:
    """The options of a verb that say which jobs it means."""

    local: Annotated[bool, typer.Option("--local", "-l", help="Runs of this machine, in ./.psjob.")] = False
    folder: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Runs of this machine, in FOLDER/.psjob.")] = None
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Jobs of this namespace of a cluster; absent: that of the context.")
    ] = None
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig; absent: the current one.")] = None
    kubeconfig: Annotated[Path | None, typer.Option(help="Kubeconfig file; absent: $KUBECONFIG, or ~/.kube/config.")] = None

    def __post_init__(self) -> None:
        if self.says_local and self._says_cluster:
            raise BadInput(f"--local and --folder mean this machine, --namespace, --context and --kubeconfig a cluster; {OneOf}")

    @property
    def says_local(self) -> bool:
        """This machine was asked for."""
        return self.local or self.folder is not None

    @property
    def says_cluster(self) -> bool:
        """A cluster was asked for."""
        return self._says_cluster or (plugin() and not self.says_local)

    @property
    def _says_cluster(self) -> bool:
        return any(value is not None for value in (self.namespace, self.context, self.kubeconfig))

    @property
    def here(self) -> Path:
        """Where runs of this machine are looked for."""
        return self.folder or Path.cwd()

    def words(self) -> list[str]:
        """The options that say the same again. A run that is found by its name in the current folder needs none."""
        given = {"--folder": self.folder, "-n": self.namespace, "--context": self.context, "--kubeconfig": self.kubeconfig}
        return [word for option, value in given.items() if value is not None for word in (option, str(value))]

    def machine(self) -> AsyncClient:
        """This machine."""
        return AsyncClient.local(self.here)

    def cluster(self) -> AsyncClient:
        """The cluster."""
        return AsyncClient.kube(self.context, self.namespace, self.kubeconfig)

    def of(self, name: str) -> AsyncClient:
        """Where the job of that name is."""
        if self.says_cluster:
            return self.cluster()
        if self.says_local or LocalJobs(self.here).knows(name) or not has_cluster():
            return self.machine()
        return self.cluster()


ANYWHERE = JobScope()
"""No option says which jobs are meant."""


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer needs it, with an option by its name for each field of a parameter that is a dataclass.

    An option that is absent has the value of the parameter's default.
    """
    kinds = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind, default = kinds[parameter.name], parameter.default
        hints = get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {parameter.name: kind}
        own = {one.name: getattr(default, one.name) for one in fields(kind)} if is_dataclass(kind) else {parameter.name: default}
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=own[name], annotation=hints[name]) for name in own]

    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{one.name: given.pop(one.name) for one in fields(kind)})
        command(**given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def plugin() -> bool:
    """Was this started as `kubectl psjob`?"""
    return Path(sys.argv[0]).name.startswith(KUBECTL)


def has_cluster() -> bool:
    """Is there a kubeconfig, or is this a pod?"""
    from psjob_operator.cluster.client import in_cluster, kubeconfig_path

    return in_cluster(None) or any(Path(path).expanduser().is_file() for path in kubeconfig_path(None).split(os.pathsep))


def bare_name(name: str) -> str:
    """A job's name, also of `pstrainingjob.psjob.dev/digits`, as `-o name` prints it. Raises BadInput."""
    found = name.rpartition("/")[2]
    if not found or found.startswith("-"):
        raise BadInput(f"{name!r} is no name of a job; give metadata.name of a PSTrainingJob, or a run of `psjob list`")
    return found


def go(client: AsyncClient, work: Coroutine[Any, Any, T]) -> T:
    """Do it, and give the connections back."""

    async def closing() -> T:
        async with client:
            return await work

    return asyncio.run(closing())


def complete_names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: names of jobs that begin so. A cluster that is slow is left out."""
    given = {key: context.params.get(key) for key in ("local", "folder", "namespace", "context", "kubeconfig")}
    found: list[str] = []
    with contextlib.suppress(Exception):
        where = JobScope(**{key: value for key, value in given.items() if value})
        sources = [where.cluster()] if where.says_cluster else [where.machine()]
        if not where.says_local and not where.says_cluster and has_cluster():
            sources.append(where.cluster())
        for client in sources:
            with contextlib.suppress(Exception):
                jobs = go(client, asyncio.wait_for(client.list(), COMPLETION_SECONDS))
                found += [name for job in jobs for name in dict.fromkeys((job.name, job.id))]
    return [name for name in dict.fromkeys(found) if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a job, or of a run of this machine.", autocompletion=complete_names)]
Names = Annotated[
    list[str], typer.Argument(metavar="NAME…", help="Names of jobs, or of runs of this machine.", autocompletion=complete_names)
]
MaybeName = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Name of a job, or of a run of this machine.", autocompletion=complete_names)
]


def complete_modes(incomplete: str) -> list[str]:
    """Modes separated by commas: what the last of them can be."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{mode}" for mode in MODES if mode.startswith(last) and mode not in taken]


def complete_settings(incomplete: str) -> list[str]:
    """`spec.training.mode=`, and `spec.training.mode=async` once the path is whole."""
    from psjob_operator.api.crd import schema

    path, given, _ = incomplete.partition("=")
    found = []
    for name, words in _leaves(schema()["properties"]["spec"], "spec"):
        if name == path and words:
            found += [f"{name}={word}" for word in words]
        elif not given:
            found.append(f"{name}=")
    return [text for text in found if text.startswith(incomplete)]


def _leaves(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, list[str]]]:
    """Each field that holds one value, and the words that it takes: none where it takes others."""
    for name, field in node.get("properties", {}).items():
        if name == OF_PODS:
            continue
        if "properties" in field:
            yield from _leaves(field, f"{path}.{name}")
        elif field.get("type") != "array":
            yield f"{path}.{name}", ["true", "false"] if field.get("type") == "boolean" else field.get("enum", [])


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Set a value of the manifest, typed as YAML. Repeatable.", autocompletion=complete_settings
    ),
]
Mode = Annotated[
    str | None, typer.Option(help="Training mode, such as sync or async; of a script sync if absent.", autocompletion=complete_modes)
]


def given_options(**options: Any) -> dict[str, Any]:
    """Those options that were given. Raises BadInput for a mode that there is not."""
    mode = options.get("mode")
    if mode is not None and mode not in MODES:
        close = difflib.get_close_matches(mode, MODES, 1)
        raise BadInput(f"--mode {mode}: " + (f"did you mean {close[0]}? " if close else "") + f"The modes are {', '.join(MODES)}")
    return {field: value for field, value in options.items() if value is not None}


def settings_of(options: dict[str, Any]) -> list[str]:
    """The same as settings of a manifest."""
    return [f"{FIELDS[field]}={value}" for field, value in options.items()]


def takes_script(job: Path, module: bool) -> bool:
    """Is it a script, and not a manifest?"""
    return module or job.suffix == SUFFIX


def must_exist(path: Path, module: bool) -> None:
    """Raises BadInput for a script that is not there."""
    if not module and not path.is_file():
        raise BadInput(f"{path}: there is no such file; give the path of a script or of a manifest")


class Helped(TyperCommand):
    """A command whose epilog holds examples, a paragraph each."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)


class ScriptCommand(Helped):
    """Takes a manifest or a script. Options that are not psjob's are the script's; a manifest takes none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {**(kwargs.pop("context_settings", None) or {}), "ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(*args, context_settings=settings, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = list(args)  # the parser takes words out of its list
        rest: list[str] = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # for a shell that completes what is not whole yet
            return rest
        job = Path(ctx.params.get("job") or "")
        if ctx.args and not ctx.params.get("module") and job.suffix != SUFFIX:
            ctx.fail(self._too_much(job, ctx.args[0].partition("=")[0]))
        for word in typed[: typed.index("--")] if "--" in typed else typed:
            option = word.partition("=")[0]
            foreign = option.startswith("--") and word in ctx.args and option not in self._own
            if foreign and (near := self._near(option, SURE)):
                ctx.fail(f"{option}: did you mean psjob's own {near[0]}? If it is an option of {job}, write -- before the script's options")
        return rest

    def _too_much(self, job: Path, word: str) -> str:
        if str(job).startswith("--"):  # - alone is standard input
            word = str(job)
        if str(job) in LAUNCHERS:
            return f"{job} {word}: is no manifest; give the script itself, such as psjob {self.name} train.py --workers 4"
        if not word.startswith("-"):
            return f"{word}: is one word too many behind {job}; only a script (SCRIPT.py) takes arguments"
        near = self._near(word, LIKELY)
        return f"No such option: {word}" + (f"; did you mean {near[0]}?" if near else "")

    @property
    def _own(self) -> list[str]:
        return [option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)]

    def _near(self, word: str, least: float) -> list[str]:
        return difflib.get_close_matches(word, self._own, 1, least)


class HelpedGroup(TyperGroup):
    """Commands that are listed with the first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, first_sentence(command.help or "")) for name, command in found if command is not None and not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)


def first_sentence(text: str) -> str:
    """Up to its first full stop or semicolon, without it."""
    flat = " ".join(text.split())
    return min((flat.partition(mark)[0] for mark in (". ", "; ")), key=len).rstrip(".")


def write_epilog(epilog: str | None, formatter: Any) -> None:
    """Paragraphs, of which examples are broken only if a shell reads on."""
    if not epilog:
        return
    formatter.write_paragraph()
    with formatter.indentation():
        for number, paragraph in enumerate(inspect.cleandoc(epilog).split("\n\n")):
            line = paragraph.strip()
            if number:
                formatter.write_paragraph()
            if line.startswith(STARTS):
                for each in break_command(line, formatter.width - formatter.current_indent):
                    formatter.write(f"{'':>{formatter.current_indent}}{each}\n")
            else:
                formatter.write_text(paragraph)


def break_command(command: str, width: int) -> list[str]:
    """Lines of a command of this width at most, if its words allow it; each but the last ends with a backslash."""
    lines, line = list[str](), ""
    for word in _shell_words(command):
        longer = f"{line} {word}" if line else word
        if line.strip() and len(longer) + len(GOES_ON) > width:
            lines.append(line + GOES_ON)
            line = f"    {word}"
        else:
            line = longer
    return [*lines, line]


def _shell_words(command: str) -> Sequence[str]:
    """Words with their quotes, so that none is broken within."""
    lexer = shlex.shlex(command, posix=False, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)
