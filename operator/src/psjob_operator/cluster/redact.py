"""What a process said of its end, before it reaches status and Events: the last lines, without what looks like a credential. Pure.

A log is read by those who may read logs of pods; a status by more people, and by their dashboards and chats.
"""

from __future__ import annotations

import json
import re
from typing import Any

from psjob_operator.printable import LINE_ENDS, printable

REMOVED = "[removed]"
"""Stands where something was that looks like a credential."""
CHARACTERS, LINES = 2048, 20
"""Of a tail at most."""
READ = 16 * 1024
"""Characters of a text that are looked at, its last ones; the kubelet gives 4,096 at most."""
PASSES = 8
"""What stood right behind a credential may be one, and is seen when that has gone."""
_BLANKS = r"[ \t]{0,32}"
_QUOTE = r"\\{0,4}[\"']"
# `pass` is a word too: it names nothing after these, glued to it or before a sign, and where its value is a count or a yes.
_GLUED = ("by", "com", "encom", "tres", "sur", "over", "under", "low", "high", "band", "all")
_APART = (
    *("by", "low", "high", "band", "all", "forward", "backward", "first", "second", "third", "last", "next", "final", "single"),
    *("one", "two", "each", "per", "every", "compiler", "fusion", "optimizer", "---"),
)
_WORD = "".join([rf"(?<!(?<![a-z]){word})" for word in _GLUED] + [rf"(?<!(?<![a-z]){word}[ \t_.-])" for word in _APART])
_COUNT = (
    r"(?:(?:\d{1,3}|\d{1,9}\.\d{1,9}|\d{1,9}/\d{1,9})(?:%|[mun]?s)?|true|false|yes|no|on|off|ok|none|null|nan)"
    r"(?:[,;.)\]}]{0,3}(?:\s|\Z)|,[\"'])"
)
_SHELL = r"(?:(?<=(?<![\w;])(?-i:PWD))|(?<=(?<![\w;])(?-i:OLDPWD)))[\"']?[=:][ \t]?[\"']?/"  # where a shell stands
_ENDINGS = rf"(?=pass){_WORD}pass(?!(?:{_QUOTE})?{_BLANKS}[ \t:=]{_BLANKS}{_COUNT})|pwd(?!{_SHELL})"
_NAMES = (
    r"(?:passw(?:or)?d|passphrase|secret|credential|token(?!s|i[sz])|authorization"
    r"|(?:api|access|account|private)[_-]?key|api[ \t]key|(?:secret[ \t])?access[ \t]key|x-amz-(?:signature|security-token))[\w.-]{0,32}"
    rf"|{_ENDINGS}"
)
# A quoted name with blanks before its colon is one where a value of JSON follows; else the kubelet says such things of volumes.
_SIGN = (
    rf"(?:{_QUOTE}[ \t]{{1,32}}:(?={_BLANKS}(?:{_QUOTE}|\d))|[ \t]{{1,32}}:(?=[ \t])"
    rf"|(?:{_QUOTE})?(?:[ \t]\[[^\]\n]{{0,64}}\])?(?:{_BLANKS}=|:))"
)
_TAG = rf"[\w.:-]{{0,32}}(?:{_NAMES})"
_SCHEMES = r"(?:(?:bearer|basic|digest|negotiate|token|!{1,2}\w{1,32})[ \t]{1,4})?"
_KEY = r"[A-Z ]{0,32}PRIVATE KEY(?: BLOCK)?-----"
_GAP = r"[ \t\r\n]{1,32}"
# Each matches once it has begun, or gives up after a bounded number of characters: so no text takes more than linear time.
_FORMS = (
    (rf"-----BEGIN {_KEY}.*?(?:-----END {_KEY}|\Z)", re.DOTALL, ""),
    (rf"\A.*-----END {_KEY}", re.DOTALL, ""),  # its beginning was cut off
    (r"(://)[^\s/\"'<>@]*(?:@[^\s/\"'<>@]+)*(?=@)", 0, r"\1"),
    (r"(hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/)[^\s\"'<>]+", 0, r"\1"),
    (rf"(\b(?:workers?|shards?|questions)(?:\.inner|\.outer)?(?:{_QUOTE})?[ \t:=]{{1,8}}(?:{_QUOTE})?)[0-9a-f]{{64,}}", 0, r"\1"),
    (
        r"(?<![0-9A-Za-z])(?:eyJ[\w.-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[0-9A-Za-z]{20,}|github_pat_\w{20,}|gl(?:pat|rt)-[\w.-]{16,}"
        r"|hf_[0-9A-Za-z]{20,}|wandb_v\d_\w{20,}|xox[a-z]-[0-9A-Za-z-]{8,}|xapp-[0-9A-Za-z-]{8,}|AIza[\w-]{30,}|ya29\.[\w.-]{20,}"
        r"|sk-(?:ant-|proj-)[\w-]{16,}|sk-[0-9A-Za-z]{20,}|npm_[0-9A-Za-z]{30,}|pypi-[\w-]{30,}|[sr]k_(?:live|test)_[0-9A-Za-z]{10,}"
        r"|hv[sbr]\.[\w-]{16,}|do[opr]_v1_[0-9a-f]{16,}"
        # More of gitleaks' rules (config/gitleaks.toml), by the beginning that each service gives its tokens.
        r"|(?:ABIA|ACCA|A3T[0-9A-Z])[0-9A-Z]{16}|sk-(?:svcacct|admin|or-v1)-[\w-]{16,}|gl(?:soat|oas|dt|ft|agent|imt|ptt|cbt|ffct)-[\w.-]{16,}"
        r"|api_org_[0-9A-Za-z]{20,}|nvapi-[\w-]{20,}|r8_[0-9A-Za-z]{20,}|gsk_[0-9A-Za-z]{20,}|xai-[0-9A-Za-z]{20,}|pplx-[0-9A-Za-z]{20,}"
        r"|dapi[0-9a-f]{32}|dckr_(?:pat|oat)_[\w-]{20,}|glc_[0-9A-Za-z+/=]{32,}|glsa_\w{32,}|GOCSPX-[\w-]{20,}|1//0[\w-]{20,}|SG\.[\w=.-]{60,}"
        r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{20,}|sq0[a-z]{3}-[\w-]{20,}|PMAK-[\w-]{20,}|lin_api_[0-9A-Za-z]{20,}|sntry[su]_[\w+/=.-]{20,}"
        r"|tskey-[\w-]{12,}|AGE-SECRET-KEY-1[0-9A-Z]{20,}|figd_[\w-]{20,}|NRAK-[0-9A-Z]{20,}|(?:pul-|sbp_|ph[cx]_)[0-9A-Za-z]{32,})",
        0,
        "",
    ),
)
_NAMED = (
    (
        # The line below, of YAML; not where it is a field with a value of its own.
        rf"((?:{_NAMES})(?:{_QUOTE})?{_BLANKS}:{_BLANKS}(?:[|>][-+0-9]{{0,2}}{_BLANKS})?\r?\n[ \t]{{1,32}})"
        r"(?!(?:-[ \t]{1,8})?[\"']?[\w.-]{1,64}[\"']?:(?:\s|\Z))\S[^\r\n]*",
        re.IGNORECASE,
        r"\1",
    ),
    (
        rf"((?:{_NAMES}){_SIGN}>?{_BLANKS})(?![|>][-+0-9]{{0,2}}{_BLANKS}\r?\n)"
        rf"(?:(\\{{0,4}}\")(?:[^\"\\\n]|\\.)+|(\\{{0,4}}')(?:[^'\\\n]|\\.)+|{_SCHEMES}[^\s\"']\S*)",
        re.IGNORECASE,
        r"\1\2\3",
    ),
    (
        # A tag without an end may be a token of a model: of words after it nothing is known.
        rf"(<{_TAG}(?:\s[^<>]{{0,200}})?>)(?:<!\[CDATA\[[^<\]]+|[^<]++(?=</{_TAG})|[^<\s]+(?=[ \t\r]{{0,32}}(?:\n|\Z)))",
        re.IGNORECASE,
        r"\1",
    ),
    (rf"(--[\w-]{{0,32}}(?:password|passwd|passphrase|secret|token|key|{_ENDINGS})[ \t]{{1,8}})[^\s-]\S*", re.IGNORECASE, r"\1"),
    (rf"(\b(?:login|machine|account){_GAP}\S{{1,128}}{_GAP}password{_GAP})(?:\"[^\"\n]+|\S+)", re.IGNORECASE, r"\1"),  # of a .netrc
    # Of a docker config: base64 has a digit, an upper-case letter or an end, as a word such as `required` has not.
    (rf"({_QUOTE}auth{_QUOTE}{_BLANKS}:{_BLANKS}{_QUOTE})(?=[a-z/+]{{0,512}}[0-9A-Z=])[0-9A-Za-z/+]{{6,}}={{0,2}}", 0, r"\1"),
    (r"(\bbearer[ \t]{1,4})\S{12,}", re.IGNORECASE, r"\1"),
    (r"([?&]sig=)[^\s&\"']+", 0, r"\1"),
    (r"((?:key|wandb)[^\n]{0,24}?(?<![0-9A-Za-z]))[0-9a-f]{40,}", re.IGNORECASE, r"\1"),
)


def _compiled(rules: tuple[tuple[str, int, str], ...]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern, flags), kept + REMOVED) for pattern, flags, kept in rules)


_BY_FORM, _BY_NAME = _compiled(_FORMS), _compiled(_NAMED)


def last_log_words(message: str, tails: bool = True) -> tuple[str, str]:
    """(termination message, tail of the log) as they may be shown. `tails`: False: no text of the process, only the fields of its JSON."""
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
    ends = text[-READ:].replace("\r\n", "\n").replace("\r", "\n")  # a bar that draws itself again
    lines = scrub(printable(ends, LINE_ENDS)).rstrip().splitlines()
    if cut and len(lines) > 1:
        lines = lines[1:]  # half a line may be half a credential, without the name that tells it
    words = _last("\n".join(lines[-LINES:]))
    for _ in range(PASSES):  # a cut takes words away that told what stands behind them
        before, words = words, _last(scrub(words))
        if words == before:
            break
    return words


def _last(words: str) -> str:
    """The last CHARACTERS characters at most, without half a word."""
    if len(words) <= CHARACTERS:
        return words
    begin = re.compile(r"\s").search(words, len(words) - CHARACTERS)
    return words[begin.end() :] if begin is not None else REMOVED


def scrub(text: str) -> str:
    """The text with REMOVED in place of what looks like a credential, or stands where one is named."""
    text = encoded_forms(text)  # a private key is known by its first line, which a name before it would take away
    for _ in range(PASSES):
        before = text
        for pattern, instead in _BY_NAME:
            text = pattern.sub(instead, text)
        text = encoded_forms(text)
        if text == before:
            break
    return text


def sentence(text: str) -> str:
    """A sentence of the kubelet or the scheduler, as it may be shown."""
    return encoded_forms(printable(text, LINE_ENDS))


def encoded_forms(text: str) -> str:
    """As `scrub`, only by their form: for words of the kubelet, in which `token:` is not followed by one."""
    for pattern, instead in _BY_FORM:
        text = pattern.sub(instead, text)
    return text


def _clean(value: Any, tails: bool) -> Any:
    if isinstance(value, str):
        return tail(value) if tails else ""
    if isinstance(value, list):
        return [_clean(item, tails) for item in value]
    if isinstance(value, dict):
        return {
            encoded_forms(printable(key)): REMOVED if tails and _tells(key, item) else _clean(item, tails) for key, item in value.items()
        }
    return value


def _tells(key: str, item: Any) -> bool:
    """Whether the name of a field makes a credential of its text, as it would on a line. A number may be one that a script reports."""
    return isinstance(item, str) and item != "" and scrub(f"{json.dumps(key)}: {json.dumps(item)}").endswith(f': "{REMOVED}"')
