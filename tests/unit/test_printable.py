"""Texts of others: none acts on a terminal, whatever way it takes there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from psjob.wire.unauthenticated import one_line
from psjob_client.cli import manifest_commands, output
from psjob_client.cli.output import TextForm
from psjob_client.compare.outcome import Comparison, SideOutcome
from psjob_client.compare.report import page as report
from psjob_client.doctor.findings import Finding
from psjob_client.jobs.view import EventView, JobView, ProcessView, Series, ShardView, WorkerView, job_html
from psjob_client.local.console import Display, screen
from psjob_client.local.monitor import RunWatch
from psjob_client.problems import JobProblem
from psjob_client.text import json_text, yaml_text
from psjob_client.ui import shown
from psjob_operator.api.status import short
from psjob_operator.cluster import redact
from psjob_operator.printable import LINE_ENDS, coloured, printable

HOSTILE = {
    "clears the screen": "\x1b[2J",
    "moves the cursor": "\x1b[10;10H",
    "hides": "\x1b[8msecret\x1b[28m",
    "sets a title": "\x1b]0;owned\x07",
    "a link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "the clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "a file of iTerm": "\x1b]1337;File=inline=1:AAAA\x07",
    "asks where it is": "\x1b[6n",
    "the other screen": "\x1b[?1049h",
    "a device string": "\x1bP+q544e\x1b\\",
    "a reset": "\x1bc",
    "one byte CSI": "\x9b31m",
    "one byte OSC": "\x9d0;owned\x9c",
    "a bell": "\x07",
    "goes back": "Failed\rComplete",
    "deletes": "abc\x08\x08\x08xyz",
    "a null": "a\0b",
    "a form feed": "a\x0cb",
    "right to left": "\u202eelif\u202c",
    "isolates": "\u2066a\u2069",
    "an embedding": "\u202bb",
    "marks": "a\u200fb\u200e",
    "no width": "pass\u200bword",
    "a joiner": "a\u2060b",
    "a soft hyphen": "a\xadb",
    "a line of Unicode": "a\u2028b\u2029c",
    "half a pair": "a\ud800b",
    "private": "a\ue000b",
    "tags": "a\U000e0041b",
    "an order mark": "\ufeffa",
    "next line": "a\x85b",
    "delete": "a\x7fb",
    "a link with a bell": "\x1b]8;id=1;file:///etc/passwd\x07open\x1b]8;;\x07",
    "one byte link": "\x9d8;;http://evil.example\x9cclick\x9d8;;\x9c",
    "asks for the clipboard": "\x1b]52;p;?\x1b\\",
    "a long clipboard": "\x1b]52;c;" + "QUFB" * 5000 + "\x07",
    "an OSC without an end": "\x1b]0;" + "a" * 3000,
    "a CSI without an end": "\x1b[" + "1;" * 2000,
    "asks for colours": "\x1b]11;?\x07",
    "sets colours": "\x1b]4;1;#000000\x07",
    "a notification": "\x1b]777;notify;t;b\x07",
    "a folder": "\x1b]7;file://evil/\x07",
    "a mark of the shell": "\x1b]133;A\x07",
    "a picture of kitty": "\x1b_Ga=T,f=100;AAAA\x1b\\",
    "a picture of sixel": "\x1bPq#0;2;0;0;0~\x1b\\",
    "a private message": "\x1b^hidden\x1b\\",
    "a string of the start": "\x1bXhidden\x1b\\",
    "keys of the mouse": "\x1b[?1003h",
    "pasted": "\x1b[201~",
    "a title that is told": "\x1b[21t",
    "scrolls": "\x1b[1;1r\x1b[50S",
    "inserts lines": "\x1b[4h\x1b[9L",
    "other letters": "\x1b(0qqq\x1b(B\x0e",
    "tmux": "\x1bPtmux;\x1b\x1b]52;c;AA\x07\x1b\\",
    "screen": "\x1bk owned\x1b\\",
    "repeats": "a\x1b[999999999b",
    "an escape in an escape": "\x1b[3\x1b[2J1m",
    "goes up": "\x1b[A\x1b[2Kall well",
    "a word in Arabic marks": "\u061ca\u06ddb",
    "old marks of direction": "\u202da\u2067b\u2068c",
    "markup of HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "markup of rich": "[link=http://evil.example]x[/link] [/nothing] [bold",
    "ends of HTML": "</pre></td></table>\"'><svg/onload=alert(1)>",
    "very long": "\x1b" * 9000,
    "markup of TeX": "$\\frac{ $x^",
}
LETTERS = 100_000 * 8
"""Of one text at most, as it is shown."""


def acts(text: str) -> list[str]:
    """Letters that are no text, ends of lines aside."""
    return [
        letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and letter not in LINE_ENDS
    ]


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE.keys())
def hostile(request: pytest.FixtureRequest) -> str:
    return f"before {request.param} after"


def job(text: str) -> JobView:
    process = {"index": 0, "state": text, "name": text, "node": text, "problem": text}
    said = {"id": text, "name": text, "namespace": text, "where": "cluster", "phase": "Failed", "message": text, "mode": text}
    said |= {"warnings": [text], "problems": [text], "progress": {"metrics": {"loss": 1.0}}, "created": 0.0, "place": text}
    return JobView.model_validate(said | {"shards": [ShardView(**process)], "workers": [WorkerView(**process)]})


def test_a_job(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    view = job(hostile)
    output.table(output.WATCHED_COLUMNS, output.job_rows([view], 0.0, output.WATCHED_COLUMNS))
    output.table(output.PROCESS_COLUMNS, output.process_rows(view))
    output.job_names([view])
    for word, text in output.job_facts(view, 0.0):
        output.echo(f"{word}: {text}")
    output.emit(json_text(view.to_manifest()))
    output.emit(yaml_text(view.to_manifest()))
    output.say(hostile)
    out, err = capsys.readouterr()
    assert "before" in out and "after" in out and not acts(out + err)
    assert json.loads(json_text(view.to_manifest())) == yaml.safe_load(yaml_text(view.to_manifest()))


def test_what_a_terminal_and_a_notebook_show(hostile: str) -> None:
    view, out = job(hostile), io.StringIO()
    Console(file=out, width=300).print(output.grid(output.PROCESS_COLUMNS, output.process_rows(view)))
    assert "before" in out.getvalue() and not acts(out.getvalue())
    assert not acts(job_html(view))


def test_events_and_numbers(hostile: str) -> None:
    event = EventView(time=0.0, reason=hostile, message=hostile, about=hostile)
    series = Series(name=hostile, times=(0.0,), steps=(1,), values=(1.0,))
    process = ProcessView(index=0, problem=hostile)
    for view in (event, series, process):
        assert not acts(json_text(view.to_manifest()))
    assert not acts(" ".join(map(str, [*output.event_row(event), *output.metric_row(series)])))


def test_a_line_of_a_log_keeps_its_colours_only(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.log_line(hostile)
    assert not acts(capsys.readouterr().out.replace("\x1b[0m", "").replace("\x1b[8m", "").replace("\x1b[28m", ""))
    assert coloured("\x1b[1;31mred\x1b[2K") == "\x1b[1;31mred\\x1b[2K\x1b[0m"
    assert coloured("a\tb") == "a\tb"


def drawn(shown: RenderableType) -> str:
    """As a terminal draws it, without colours."""
    out = io.StringIO()
    Console(file=out, width=300, color_system=None, force_terminal=False).print(shown)
    return out.getvalue()


def printed(act: Callable[[], object]) -> str:
    """What a command prints, on both streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        act()
    return out.getvalue() + err.getvalue()


def of_a_run(text: str) -> str:
    """The live part of `psjob run`, of a shard 0 that says `text` wherever it says a word."""
    watch = RunWatch(10.0, b"")
    watch.progress = {
        "step": 1, "totalSteps": 9, "waiting": text, "checkpointProblem": text, "workers": [{"rank": 0, "state": text, "clock": 1}],
        "metrics": {text: 1.0}, "loss": text,
    }  # fmt: skip
    return drawn(screen("job", None, watch, 0.0, "step", text)) + drawn(screen(text, None, watch, 0.0, "step"))


def a_comparison(text: str) -> Comparison:
    side = SideOutcome(text, text, text, 1.0, 1.0, {text: [(0.0, 0.0, 1.0)]}, {text: 1.0}, warnings=[text])
    return Comparison(text, "s", {text: text}, text, [side])


COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
OUTPUTS: dict[str, Callable[[str], str]] = {
    "get": lambda text: printed(lambda: output.table(output.WATCHED_COLUMNS, output.job_rows([job(text)], 0.0, output.WATCHED_COLUMNS))),
    "get -o name": lambda text: printed(lambda: output.job_names([job(text)])),
    "get -o json": lambda text: json_text(job(text).to_manifest()),
    "get -o yaml": lambda text: yaml_text(job(text).to_manifest()),
    "describe": lambda text: printed(lambda: [output.echo(f"{word}: {told}") for word, told in output.job_facts(job(text), 0.0)]),
    "processes": lambda text: printed(lambda: output.table(output.PROCESS_COLUMNS, output.process_rows(job(text)))),
    "top": lambda text: drawn(output.grid(output.PROCESS_COLUMNS, output.process_rows(job(text)))),
    "events": lambda text: " ".join(map(str, output.event_row(EventView(time=0.0, reason=text, message=text, about=text)))),
    "metrics": lambda text: " ".join(map(str, output.metric_row(Series(name=text, times=(0.0,), steps=(1,), values=(1.0,))))),
    "logs": lambda text: COLOURS.sub("", printed(lambda: output.log_line(text))),
    "a refusal": lambda text: printed(lambda: output.say(JobProblem(text))),
    "doctor": lambda text: printed(lambda: manifest_commands._print_findings([Finding("problem", text, text, text, text)], TextForm.text)),
    "run": of_a_run,
    "run in a pipe": lambda text: printed(lambda: Display("job", progress=False).say(text)),
    "a notebook": lambda text: job_html(job(text)),
    "the page": lambda text: json.dumps(
        shown.detail(job(text), [], [EventView(time=0.0, reason=text, message=text)], [], 0.0), ensure_ascii=False
    ),
    "the page's list": lambda text: json.dumps(shown.row(job(text)), ensure_ascii=False),
    "a report": lambda text: report(a_comparison(text)),
    "status": lambda text: "".join(redact.last_log_words(f"first\n{text}\n")),
    "status of JSON": lambda text: redact.last_log_words(json.dumps({"error": text, text: 1}))[0],
    "a condition": short,
    "words of the kubelet": redact.sentence,
    "a shard's log": lambda text: one_line(text, 4000),
}
"""If a text of a script, a pod, a node or an API message comes to people."""
PAGES = ("a notebook", "a report")


def test_there_are_as_many_texts_and_outputs_as_are_promised() -> None:
    assert len(HOSTILE) >= 60 and len(set(HOSTILE.values())) == len(HOSTILE) and len(OUTPUTS) >= 20


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_text_acts_where_it_is_shown(name: str) -> None:
    for what, text in HOSTILE.items():
        told = OUTPUTS[name](f"before {text} after")
        assert not acts(told), (what, acts(told)[:5])
        assert len(told) <= 20 * LETTERS, what
        if name in PAGES:
            assert "<script>alert" not in told and "<img src=x" not in told and "<svg/onload" not in told, what


def test_status_and_events(hostile: str) -> None:
    message, tail = redact.last_log_words(f"first\n{hostile}\n")
    assert "after" in tail and not acts(message + tail)
    assert not acts(redact.last_log_words(json.dumps({"error": hostile, hostile: 1}))[0])
    assert not acts(redact.sentence(hostile)) and not acts(short(hostile))


def test_commands_print_by_these_functions_only() -> None:
    own = Path(output.__file__)
    for file in own.parent.glob("*.py"):
        text = file.read_text()
        if file.name not in (own.name, "entry.py"):  # that one prints names of files for completion, as the shell gave them
            assert "typer.echo(" not in text and not re.search(r"(?<![\w.])print\(", text), file


@given(st.text(), st.integers(1, 50))
def test_any_text(text: str, most: int) -> None:
    shown = printable(text, most=most)
    assert not acts(shown) and len(shown) <= most and "\n" not in shown
    if text.isprintable() and len(text) <= most:
        assert shown == text


def test_blanks_of_names_stay() -> None:
    assert printable("/Users/a\xa0b/run") == "/Users/a\xa0b/run"
    assert printable("größe 重み 👍") == "größe 重み 👍"


@pytest.mark.parametrize("text", ["\x1b[" + ";" * 200000 + "m", "\x1b]" * 100000, "a" * 300000])
def test_long_ones_are_cut(text: str) -> None:
    assert len(printable(text)) <= 1 << 16
    assert len(coloured(text)) <= 10 << 16
