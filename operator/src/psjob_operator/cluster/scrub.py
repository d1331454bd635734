"""What a process said of its end, before it reaches status and Events: the last lines, without what looks like a credential. Pure.

A log is read by those who may read logs of pods; a status by more people, and by their dashboards and chats.
"""

from __future__ import annotations

import json
import re
from typing import Any

REMOVED = "[removed]"
"""Stands where something was that looks like a credential."""
CHARACTERS, LINES = 2048, 20
"""Of a tail at most."""
READ = 16 * 1024
"""Characters of a text that are looked at, its last ones; the kubelet gives 4,096 at most."""
PASSES = 8
"""What stood right behind a credential may be one, and is seen when that has gone."""
_NAMES = (
    r"passw(?:or)?d|passphrase|secret|credential|token(?!s|i[sz])|authorization"
    r"|(?:api|access|account|private)[_-]?key|x-amz-(?:signature|security-token)"
)
_SCHEMES = r"(?:(?:bearer|basic|digest|negotiate|token)[ \t]{1,4})?"
# Each matches once it has begun, or gives up after a bounded number of characters: so no text takes more than linear time.
_FORMS = (
    (r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,32}PRIVATE KEY-----|\Z)", re.DOTALL, ""),
    (r"\A.*-----END [A-Z ]{0,32}PRIVATE KEY-----", re.DOTALL, ""),  # its beginning was cut off
    (r"(://)[^\s/\"'<>@]*(?:@[^\s/\"'<>@]+)*(?=@)", 0, r"\1"),
    (
        r"(?<![0-9A-Za-z])(?:eyJ[\w.-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[0-9A-Za-z]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
        r"|hf_[0-9A-Za-z]{20,}|wandb_v\d_\w{20,}|xox[a-z]-[0-9A-Za-z-]{8,}|xapp-[0-9A-Za-z-]{8,}|AIza[\w-]{30,}|ya29\.[\w.-]{20,}"
        r"|sk-(?:ant-|proj-)[\w-]{16,}|sk-[0-9A-Za-z]{20,}|npm_[0-9A-Za-z]{30,}|pypi-[\w-]{30,})",
        0,
        "",
    ),
)
_NAMED = (
    (
        rf"((?:{_NAMES})[\w.-]{{0,32}}\\{{0,4}}[\"']?(?:[ \t]{{0,8}}=|:)>?[ \t]{{0,8}})"
        rf"(?:(\\{{0,4}}\")(?:[^\"\\\n]|\\.)+|(\\{{0,4}}')(?:[^'\\\n]|\\.)+|{_SCHEMES}[^\s\"']\S*)",
        re.IGNORECASE,
        r"\1\2\3",
    ),
    (r"(--[\w-]{0,32}(?:password|passwd|passphrase|secret|token|key)[ \t]{1,8})[^\s-]\S*", re.IGNORECASE, r"\1"),
    (r"(\blogin[ \t]{1,4}\S{1,128}[ \t]{1,4}password[ \t]{1,4})\S+", re.IGNORECASE, r"\1"),  # of a .netrc
    (r"(\bbearer[ \t]{1,4})\S{12,}", re.IGNORECASE, r"\1"),
    (r"([?&]sig=)[^\s&\"']+", 0, r"\1"),
    (r"((?:key|wandb)[^\n]{0,24}?(?<![0-9A-Za-z]))[0-9a-f]{40,}", re.IGNORECASE, r"\1"),
)


def _compiled(rules: tuple[tuple[str, int, str], ...]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern, flags), kept + REMOVED) for pattern, flags, kept in rules)


_BY_FORM, _BY_NAME = _compiled(_FORMS), _compiled(_NAMED)


def told(message: str, tails: bool = True) -> tuple[str, str]:
    """(termination message, tail of the log) as they may be shown. `tails`: False: no word of the process, only the fields of its JSON."""
    try:
        read = json.loads(message)
        if isinstance(read, dict):
            # The kubelet gives the end of the log, with its newline, where no message was left.
            return json.dumps(_clean(read, tails)) + ("\n" if message.endswith("\n") else ""), ""
    except (ValueError, RecursionError):
        pass
    words = tail(message) if tails else ""
    return words, words


def tail(text: str) -> str:
    """The last LINES lines and CHARACTERS characters of a text, scrubbed."""
    cut = len(text) > READ
    lines = scrub(text[-READ:]).rstrip().splitlines()
    if cut and len(lines) > 1:
        lines = lines[1:]  # half a line may be half a credential, without the name that tells it
    words = "\n".join(lines[-LINES:])
    if len(words) <= CHARACTERS:
        return words
    begin = re.compile(r"\s").search(words, len(words) - CHARACTERS)
    return words[begin.end() :] if begin is not None else REMOVED


def scrub(text: str) -> str:
    """The text with REMOVED in place of what looks like a credential, or stands where one is named."""
    for _ in range(PASSES):
        before = text
        for pattern, instead in _BY_NAME:
            text = pattern.sub(instead, text)
        text = forms(text)
        if text == before:
            break
    return text


def forms(text: str) -> str:
    """As `scrub`, by their form alone: for words of the kubelet, in which `token:` is not followed by one."""
    for pattern, instead in _BY_FORM:
        text = pattern.sub(instead, text)
    return text


def _clean(value: Any, tails: bool) -> Any:
    if isinstance(value, str):
        return tail(value) if tails else ""
    if isinstance(value, list):
        return [_clean(item, tails) for item in value]
    if isinstance(value, dict):
        return {key: _clean(item, tails) for key, item in value.items()}
    return value
