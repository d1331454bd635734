"""Times as status holds them: RFC 3339 in UTC with whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(at: float) -> str:
    """Unix seconds as text; the fraction is cut off."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unix(text: str | None) -> float | None:
    """Text as unix seconds; None where there is none, or where it is not such a time (then it is no fact)."""
    if not text:
        return None
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
