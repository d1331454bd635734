"""Components of a bill of materials, each with the files that it owns."""

from __future__ import annotations

import email
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Part:
    """One component: `of` are its fields in CycloneDX, `files` those of the archive that it brought."""

    of: dict[str, Any]
    files: set[str] = field(default_factory=set)

    def document(self) -> dict[str, Any]:
        """The component, with its files as occurrences."""
        where = {"evidence": {"occurrences": [{"location": file} for file in sorted(self.files)]}} if self.files else {}
        return {**self.of, **where}


def python_parts(names: Iterable[str], read: Mapping[str, bytes]) -> list[Part]:
    """The Python distributions among those files, by their .dist-info; `read` holds the METADATA and RECORD of each.

    Files of a package in a `_vendor` folder belong to the .dist-info that lies there beside them.
    """
    names, parts = set(names), []
    for path in sorted(name for name in names if name.endswith(".dist-info/METADATA")):
        folder = path.removesuffix("METADATA")
        base = folder.rstrip("/").rpartition("/")[0]
        record = read.get(f"{folder}RECORD", b"").decode()
        listed = {f"{base}/{line.split(',')[0]}".lstrip("/") for line in record.splitlines() if line and not line.startswith("..")}
        files = {name for name in names if name in listed or name.startswith(folder) or source(name) in listed}
        parts.append(Part(distribution(read[path]), files))
    return parts


def distribution(metadata: bytes) -> dict[str, Any]:
    """A Python distribution as its METADATA tells."""
    told = email.message_from_bytes(metadata)
    name, version = plain(told["Name"]), told["Version"]
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "licenses": _licenses(told), "purl": purl}


def requirements(metadata: bytes) -> list[dict[str, Any]]:
    """What a distribution asks for: components without files or version, required or optional (an extra's)."""
    found: dict[str, dict[str, Any]] = {}
    for line in email.message_from_bytes(metadata).get_all("Requires-Dist") or []:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)", line)
        assert match is not None
        name, scope = plain(match[1]), "optional" if "extra ==" in line else "required"
        if found.get(name, {}).get("scope") == "required":
            continue
        ranges = [{"name": "psjob:range", "value": match[2].strip()}] if match[2].strip() else []
        found[name] = {
            "type": "library",
            "bom-ref": f"asks:{name}",
            "name": name,
            "scope": scope,
            "purl": f"pkg:pypi/{name}",
            "properties": ranges,
        }
    return [found[name] for name in sorted(found)]


def source(name: str) -> str:
    """The source of a compiled Python file; any other name as it is."""
    return re.sub(r"__pycache__/([^/]+)\.cpython-\d+(?:\.opt-\d)?\.pyc$", r"\1.py", name)


def plain(name: str) -> str:
    """A distribution's name as an index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _licenses(told: Any) -> list[dict[str, Any]]:
    if expression := told["License-Expression"]:
        return [{"expression": expression}]
    classified = [line.rpartition(" :: ")[2] for line in told.get_all("Classifier") or [] if line.startswith("License :: ")]
    text = (told["License"] or "").strip()
    short = [text] if text and "\n" not in text and len(text) <= 80 and text != "UNKNOWN" else []
    return [{"license": {"name": name}} for name in short or sorted(classified)]
