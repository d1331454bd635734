"""Scripts in place of manifests on the command line: `psjob run train.py --workers 4 -- --lr 0.1`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

from psjob_client.cli.completing import modes
from psjob_client.cli.helping import Helped
from psjob_client.local.manifest import PYTHONS
from psjob_client.problems import BadInput
from psjob_operator.contract import MODES

SUFFIX = ".py"
LIKELY, SURE = 0.6, 0.85
"""How alike two options are, of which one may be the other misspelt."""
LAUNCHERS = PYTHONS | {"torchrun"}
FIELDS = {
    "workers": "spec.workers.replicas",
    "shards": "spec.ps.shards",
    "mode": "spec.training.mode",
    "image": "spec.workers.template.spec.containers[0].image",
}

Workers = Annotated[int | None, typer.Option(metavar="N", help="Number of workers; of a script 2 if absent.")]
Shards = Annotated[int | None, typer.Option(metavar="N", help="Number of shards; of a script 1 if absent.")]
Mode = Annotated[str | None, typer.Option(help="Training mode, such as sync or async; of a script sync if absent.", autocompletion=modes)]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT.py is the name of a module, as in python -m.")]


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


def given(**options: Any) -> dict[str, Any]:
    """Those options that were given. Raises BadInput for a mode that there is not."""
    mode = options.get("mode")
    if mode is not None and mode not in MODES:
        close = difflib.get_close_matches(mode, MODES, 1)
        raise BadInput(f"--mode {mode}: " + (f"did you mean {close[0]}? " if close else "") + f"The modes are {', '.join(MODES)}")
    return {field: value for field, value in options.items() if value is not None}


def settings_of(options: dict[str, Any]) -> list[str]:
    """The same as settings of a manifest."""
    return [f"{FIELDS[field]}={value}" for field, value in options.items()]


def is_script(job: Path, module: bool) -> bool:
    """Is it a script, and not a manifest?"""
    return module or job.suffix == SUFFIX


def must_exist(path: Path, module: bool) -> None:
    """Raises BadInput for a script that is not there."""
    if not module and not path.is_file():
        raise BadInput(f"{path}: there is no such file; give the path of a script or of a manifest")
