"""Models as text: YAML that people and Git read well, and JSON."""

from __future__ import annotations

import json
from typing import Any

import yaml


def as_yaml(data: Any) -> str:
    """YAML without anchors, in the order of the data; a text of several lines is a block of lines."""
    return yaml.dump(data, Dumper=_Readable, sort_keys=False, width=140, allow_unicode=True)


def as_json(data: Any) -> str:
    """Indented JSON."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


class _Readable(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)
