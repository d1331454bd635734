"""Log lines of the operator: for people as text, for collectors as one JSON object a line, each with the job it is about."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

Format = Literal["text", "json"]


def set_up(style: Format, level: str) -> None:
    """Send everything to stderr in this style."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("kopf", "aiohttp", "asyncio", "kubernetes"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: record.__dict__[key] for key in ("job", "uid") if record.__dict__.get(key)})
        if record.exc_info:
            line["error"] = _why(self, record)
        return json.dumps(line, ensure_ascii=False)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        job = f" {record.__dict__['job']}" if record.__dict__.get("job") else ""
        text = f"{at} {record.levelname.lower():<7}{job} {record.getMessage()}"
        return text + (f": {_why(self, record)}" if record.exc_info else "")


def _why(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The error in a line; the whole trace only for one who asked for --log-level debug."""
    found = record.exc_info if isinstance(record.exc_info, tuple) else (None, None, None)
    if logging.getLogger().isEnabledFor(logging.DEBUG) and found[0] is not None:
        return "\n" + formatter.formatException(found)
    return f"{found[0].__name__ if found[0] else 'error'}: {found[1]}"
