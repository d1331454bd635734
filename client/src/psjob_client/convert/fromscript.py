"""The manifest that `psjob run train.py` stands for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

import yaml

from psjob_client.convert.draft import job_name


@dataclass(frozen=True)
class Script:
    """A script, or a module, and how it is to be trained."""

    path: str
    """As seen from the folder in which workers start."""
    arguments: Sequence[str] = ()
    module: bool = False
    """`path` is the name of a module, for `python -m`."""
    workers: int = 2
    shards: int = 1
    mode: str = "sync"

    def manifest(self, template: str) -> str:
        """As YAML with the comments of `template`; the image is one to be replaced."""
        name = job_name(self.path.rpartition(".")[2] if self.module else self.path.rpartition("/")[2].removesuffix(".py"))
        words = ["python", *(["-m"] if self.module else []), self.path, *self.arguments]
        values = {"name": name, "image": image_of(name), "command": command_of(words), "mode": self.mode}
        return Template(template).substitute(values, workers=self.workers, shards=self.shards)


def image_of(name: str) -> str:
    """An image that a user replaces by his own."""
    return f"registry.example.com/{name}:1"


def command_of(words: Sequence[str]) -> str:
    """A command as a list in YAML. Kubernetes takes `$(NAME)` for a variable, and `$$` for a dollar sign."""
    text: str = yaml.safe_dump([word.replace("$", "$$") for word in words], default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.strip()
