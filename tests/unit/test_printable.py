"""Texts of others: none acts on a terminal, whatever way it takes there."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from psjob_client.cli import output, rows
from psjob_client.jobs.html import job_html
from psjob_client.jobs.text import as_json, as_yaml
from psjob_client.jobs.view import EventView, JobView, ProcessView, Series, ShardView, WorkerView
from psjob_operator.cluster import scrub
from psjob_operator.plan.text import short
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
}


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
    output.table(rows.WATCHED, rows.jobs([view], 0.0, rows.WATCHED))
    output.table(rows.PROCESSES, rows.processes(view))
    output.job_names([view])
    for word, text in rows.facts(view, 0.0):
        output.echo(f"{word}: {text}")
    output.emit(as_json(view.to_manifest()))
    output.emit(as_yaml(view.to_manifest()))
    output.say(hostile)
    out, err = capsys.readouterr()
    assert "before" in out and "after" in out and not acts(out + err)
    assert json.loads(as_json(view.to_manifest())) == yaml.safe_load(as_yaml(view.to_manifest()))


def test_what_a_terminal_and_a_notebook_show(hostile: str) -> None:
    view, out = job(hostile), io.StringIO()
    Console(file=out, width=300).print(output.grid(rows.PROCESSES, rows.processes(view)))
    assert "before" in out.getvalue() and not acts(out.getvalue())
    assert not acts(job_html(view))


def test_events_and_numbers(hostile: str) -> None:
    event = EventView(time=0.0, reason=hostile, message=hostile, about=hostile)
    series = Series(name=hostile, times=(0.0,), steps=(1,), values=(1.0,))
    process = ProcessView(index=0, problem=hostile)
    for view in (event, series, process):
        assert not acts(as_json(view.to_manifest()))
    assert not acts(" ".join(map(str, [*rows.event(event), *rows.metric(series)])))


def test_a_line_of_a_log_keeps_its_colours_only(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.log_line(hostile)
    assert not acts(capsys.readouterr().out.replace("\x1b[0m", "").replace("\x1b[8m", "").replace("\x1b[28m", ""))
    assert coloured("\x1b[1;31mred\x1b[2K") == "\x1b[1;31mred\\x1b[2K\x1b[0m"
    assert coloured("a\tb") == "a\tb"


def test_status_and_events(hostile: str) -> None:
    message, tail = scrub.told(f"first\n{hostile}\n")
    assert "after" in tail and not acts(message + tail)
    assert not acts(scrub.told(json.dumps({"error": hostile, hostile: 1}))[0])
    assert not acts(scrub.sentence(hostile)) and not acts(short(hostile))


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
