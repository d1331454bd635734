"""`psjob init`: a job to start from, as files."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from psjob_client.cli.output import echo
from psjob_client.convert.draft import command_of, image_of, job_name
from psjob_client.problems import BadInput
from psjob_operator.api.load import load_job

TEMPLATES = files("psjob_client") / "templates"
"""A folder a template, each file with this suffix; what all have in common is in `_common`."""
SUFFIX, COMMON, MANIFEST = ".tmpl", "_common", "job.yaml"
TESTED = {"torch": "2.15.0", "transformers": "5.23.0", "lightning": "2.6.6", "accelerate": "1.15.0"}
"""For requirements.txt, where a package is not installed here."""
EXAMPLES = """Examples:

  psjob init

  psjob init hello && psjob run hello/job.yaml

  psjob init mnist --template lightning --image registry.example.com/me/mnist:1 --workers 4

Exit codes: 0 the files are written, 2 nothing was written."""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are written; made if it is not there.")] = Path(),
    template: Annotated[str, typer.Option(help="What the script trains with: pytorch, transformers, lightning or accelerate.")] = "pytorch",
    name: Annotated[str | None, typer.Option(help="The job's name; absent: made from the folder's.")] = None,
    image: Annotated[str | None, typer.Option(help="The workers' image; absent: registry.example.com/NAME:1.")] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Number of workers.")] = 2,
    shards: Annotated[int, typer.Option(metavar="N", help="Number of shards.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write a manifest, a training script and a Dockerfile to start from."""
    name = name if name is not None else job_name(folder.absolute().name)
    image = image if image is not None else image_of(name)
    words = {"name": name, "image": image, "workers": str(workers), "shards": str(shards), "mode": "sync", **versions()}
    words["command"] = command_of(["python", "train.py"])
    made = {file: Template(text).substitute(words) for file, text in _texts(template).items()}
    job, problems = load_job(made[MANIFEST])
    if job is None:
        raise BadInput(*(f"nothing was written: {problem}" for problem in problems))
    if job.spec.workers.template["spec"]["containers"][0]["image"] != image:
        raise BadInput(f"--image {image}: is no name of an image, and nothing was written; give one such as {image_of(name)}")
    there = [file for file in made if (folder / file).exists()]
    if there and not force:
        raise BadInput(
            f"{folder}: holds {', '.join(there)} already, and nothing was written; name another folder, or give --force to overwrite"
        )
    _write(folder, made)
    echo(f"{name}: wrote {', '.join(made)} in {folder.absolute()}")
    echo("Next:")
    if any(_installed(package) is None for package in _packages(made)):
        echo(f"  pip install -r {_path(folder, 'requirements.txt')}")
    echo(f"  psjob run {_path(folder, 'job.yaml')}        trains on this machine")
    echo(f"  docker build -t {image} {shlex.quote(str(folder))} && docker push {image}")
    echo(f"  psjob submit {_path(folder, 'job.yaml')}     trains on a cluster")


def manifest_template() -> str:
    """That of every job."""
    return (TEMPLATES / COMMON / f"{MANIFEST}{SUFFIX}").read_text()


def versions() -> dict[str, str]:
    """Of the packages that scripts import: what is installed here, else what psjob is tested with."""
    return {package: _installed(package) or tested for package, tested in TESTED.items()}


def _texts(template: str) -> dict[str, str]:
    names = sorted(place.name for place in TEMPLATES.iterdir() if place.is_dir() and not place.name.startswith("_"))
    if template not in names:
        raise BadInput(f"--template {template}: there is no such template; take {', '.join(names)}")
    places = [place for folder in (COMMON, template) for place in (TEMPLATES / folder).iterdir() if place.name.endswith(SUFFIX)]
    places.sort(key=lambda place: (place.name != f"{MANIFEST}{SUFFIX}", place.name))
    return {place.name.removesuffix(SUFFIX): place.read_text() for place in places}


def _packages(made: dict[str, str]) -> list[str]:
    return [line.partition("==")[0] for line in made["requirements.txt"].split()]


def _installed(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def _path(folder: Path, file: str) -> str:
    return shlex.quote(str(folder / file))


def _write(folder: Path, made: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in made.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror or error}; name a folder that you may write to") from None
