"""Progress is bars on a terminal and a few lines elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from compressor import ui


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(ui, "time", SimpleNamespace(monotonic=lambda: Clock.now))
    return Clock


def plain():
    stream = io.StringIO()
    return ui.RichUI(Console(file=stream, width=80)), stream


def test_stages_and_notes_are_lines_as_they_are(clock):
    shown, stream = plain()
    clock.now += 75
    shown.stage("quantize")
    shown.note("kept [bold]model.embed_tokens[/bold] " + "x" * 100)
    assert stream.getvalue() == f"[1:15] quantize\n  kept [bold]model.embed_tokens[/bold] {'x' * 100}\n"


def test_without_a_terminal_a_line_comes_every_ten_percent_at_most(clock):
    shown, stream = plain()
    with shown.progress("rows", 1000) as progress:
        for _ in range(1000):
            clock.now += 0.0625
            progress.advance()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "  rows: 10% (100/1000), 0:06"
    assert lines[-1] == "  rows: 100% (1000/1000), 1:02"
    assert len(lines) == 10


def test_without_a_terminal_a_slow_task_speaks_every_thirty_seconds(clock):
    shown, stream = plain()
    with shown.progress("rows", 1000) as progress:
        for _ in range(5):
            clock.now += 16
            progress.advance()
    assert stream.getvalue().splitlines() == ["  rows: 0% (2/1000), 0:32", "  rows: 0% (4/1000), 1:04"]


def test_without_a_terminal_a_quick_task_is_one_line(clock):
    shown, stream = plain()
    with shown.progress("rows", 100) as progress:
        for _ in range(100):
            progress.advance()
    assert stream.getvalue() == "  rows: 100% (100/100), 0:00\n"


def test_an_empty_task_and_a_larger_step_end_at_their_total(clock):
    shown, stream = plain()
    with shown.progress("nothing", 0):
        pass
    with shown.progress("rows", 3) as progress:
        progress.advance(2)
        progress.advance()
    assert stream.getvalue() == "  rows: 100% (3/3), 0:00\n"


def test_a_terminal_gets_bars_within_80_columns_even_for_tasks_inside_tasks():
    stream = io.StringIO()
    shown = ui.RichUI(Console(file=stream, width=80, force_terminal=True, color_system=None))
    with shown.progress("acceptance, baseline target", 2) as outer, shown.progress("inner", 2) as inner:
        inner.advance()
        outer.advance()
        shown.note("a note")
    text = stream.getvalue()
    assert "acceptance, baseline target" in text and "1/2" in text and "a note" in text
    lines = text.replace("\r", "\n").splitlines()
    assert max(len(part) for part in lines) < 160  # control sequences included


def test_bars_stop_when_the_work_fails():
    shown = ui.RichUI(Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(RuntimeError), shown.progress("rows", 2):
        raise RuntimeError
    with shown.progress("rows", 2) as progress:  # a live display left running would refuse a second
        progress.advance()


def test_the_null_ui_says_nothing(capfd):
    silent = ui.NullUI()
    silent.stage("a")
    silent.note("b")
    with silent.progress("c", 1) as progress:
        progress.advance()
    assert capfd.readouterr() == ("", "")
