"""How people read what the client prints: models as YAML and JSON, spans of time, bytes and numbers. Pure."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import yaml

from psjob_operator.api.crd import NoAnchors

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def yaml_text(data: Any) -> str:
    """YAML without anchors, in the order of the data; a text of several lines is a block of lines."""
    return yaml.dump(data, Dumper=Readable, sort_keys=False, width=140, allow_unicode=True)


def json_text(data: Any) -> str:
    """Indented JSON."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


class Readable(NoAnchors):
    """Texts of several lines are blocks of lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Readable.add_representer(str, _text)


def span(seconds: float | None) -> str:
    """`12 s`, `3 min 5 s`, `2 h 40 min`, `6 d 1 h`; empty where it is not known."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 86_400 else f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def amount(size: float | Decimal | None) -> str:
    """A number of bytes: `1.5 GiB`; empty where it is not known."""
    if size is None:
        return ""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {UNITS[unit]}" if value < 1000 else f"{value:.0f} {UNITS[unit]}"


def number(value: float | None) -> str:
    """Four digits; empty where there is none."""
    return "" if value is None else f"{value:.4g}"
