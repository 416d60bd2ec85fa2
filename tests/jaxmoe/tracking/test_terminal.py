# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The live view: its cells, its lines, what it does to a terminal, and who gets it."""

from __future__ import annotations

import errno
import io
import logging
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxmoe.tracking import BITS_PER_BYTE, LOSS, MFU, TOKENS_PER_SECOND, MissingPackageError
from jaxmoe.tracking.console import ConsoleTracker
from jaxmoe.tracking.terminal import (
    BLOCKS,
    DEAD,
    MAX_CELLS,
    MAX_LINES,
    LiveTracker,
    SilentConsole,
    TerminalView,
    cell,
    is_watched,
    open_console,
    strip,
    worst_of_groups,
)
from jaxmoe.tracking.tracker import BITS_PER_TOKEN, DEAD_FRACTION, DROPPED_FRACTION

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
NUMBERS = {
    LOSS: 3.21406,
    BITS_PER_BYTE: 1.8231,
    TOKENS_PER_SECOND: 12_449.0,
    MFU: 0.4123,
    DEAD_FRACTION: 0.0,
    DROPPED_FRACTION: 0.25,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def text_of(lines):
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.0, (DEAD, "red")),
        (1e-4, (BLOCKS[0], "red")),
        (0.09, (BLOCKS[0], "red")),
        (float("nan"), (DEAD, "red")),
        (0.1, (BLOCKS[0], "yellow")),
        (0.49, (BLOCKS[1], "yellow")),
        (0.5, (BLOCKS[2], "green")),
        (1.0, (BLOCKS[4], "green")),
        (1.5, (BLOCKS[6], "green")),
        (1.51, (BLOCKS[6], "yellow")),
        (2.0, (BLOCKS[7], "yellow")),
        (2.01, (BLOCKS[7], "red")),
        (9.0, (BLOCKS[7], "red")),
    ],
)
def test_a_cell_is_height_and_colour_of_the_load(ratio, expected):
    assert cell(ratio) == expected


def test_experts_that_share_a_cell_show_the_worst():
    ratio = np.array([[1.0, 3.0, 0.05, 1.2, 1.1, 0.9, 1.0]])
    assert worst_of_groups(ratio, 7) is ratio
    assert worst_of_groups(ratio, 4).tolist() == [[3.0, 0.05, 0.9, 1.0]]
    assert worst_of_groups(ratio, 1).tolist() == [[0.05]]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (4, 8), (48, 128), (200, 1000), (64, 8)])
def test_the_strip_is_bounded(layers, experts, width):
    load = np.random.default_rng(0).dirichlet(np.ones(experts), size=layers)
    lines = text_of(strip(load, width))
    assert len(lines) <= MAX_LINES + 2
    assert max(map(len, lines)) <= width
    shown = re.findall(r"L(\d+)", " ".join(lines))
    assert shown[0] == "0" and shown[-1] == str(layers - 1)
    cells = re.findall(rf"[{BLOCKS}{DEAD}]+", "\n".join(lines).partition(" of ")[0])
    assert all(len(row) <= MAX_CELLS for row in cells)
    if len(shown) < layers:
        assert f"{len(shown)} of {layers} layers" in " ".join(lines[-2:])
    else:
        assert len(shown) == layers


def test_the_view_says_it_all():
    load = np.array([[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.2, 0.0]])
    view = TerminalView(
        total_steps=300, step=120, seconds_gone=31, seconds_left=58, metrics=NUMBERS, load=load
    )
    lines = text_of(view.lines(100))
    assert lines[0].startswith("step 120/300 ")
    assert lines[0].endswith("  40%   0:31 elapsed   eta 0:58")
    assert lines[1] == "loss 3.2141   held out 1.8231 bits/byte   12.4k tokens/s   mfu 41.2%"
    assert lines[2] == f"L0 {BLOCKS[4] * 4}   L1 {BLOCKS[7]}{BLOCKS[1]}{BLOCKS[3]}{DEAD}"
    assert lines[3] == "max violation 1.80 in layer 1   dead 1 of 8   dropped 25.0%"
    styles = dict(view.lines(100)[3])
    assert styles["1.80"] == "red" and styles["1 of 8"] == "red" and styles["25.0%"] == "red"
    for width in (20, 40, 60):
        assert all(len(line) <= max(width, 60) for line in text_of(view.lines(width)))


def test_every_x_of_the_view_is_a_dead_expert():
    for load in ([0.0, 0.5, 0.5, 0.0], [1e-3, 0.5, 0.499, 0.0], [0.25] * 4):
        view = TerminalView(total_steps=10, metrics=NUMBERS, load=np.array([load]))
        strip, *_, numbers = text_of(view.lines(100))[2:4]
        assert f"dead {strip.count(DEAD)} of 4" in numbers and strip.count(DEAD) == load.count(0.0)


def test_a_run_without_bytes_or_experts_shows_what_there_is():
    view = TerminalView(total_steps=10, metrics={LOSS: 1.0, BITS_PER_TOKEN: 1.5})
    assert text_of(view.lines(80))[1:] == ["loss 1.0000   held out 1.5000 bits/token"]
    waiting = text_of(TerminalView(total_steps=10).lines(80))
    assert waiting[1] == "compiled; the first steps are under way"


def live(stream, **environment):
    times = iter(range(0, 1000, 10))
    return LiveTracker(20, stream, clock=lambda: float(next(times)), width=90)


def test_the_live_tracker_redraws_and_leaves_the_last_view(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    tracker = live(stream)
    tracker.start(0)
    tracker.show({}, np.full((2, 4), 0.25))
    tracker.log(10, NUMBERS)
    tracker.log_text(10, "warning", "the loss is [red]not finite[/red]")
    tracker.show({BITS_PER_BYTE: 1.5})
    tracker.log(20, {LOSS: 2.0})
    tracker.close()
    tracker.close()
    output = stream.getvalue()
    assert "\x1b[32m" in output  # green cells
    # The cursor is shown again at once, and no other mode of the terminal is touched.
    assert output.count("\x1b[?25l") == 1
    assert output.index("\x1b[?25h") - output.index("\x1b[?25l") < 10
    assert set(re.findall(r"\x1b\[\?(\d+)", output)) == {"25"}
    plain = ESCAPE.sub("", output)
    assert "warning at step 10: the loss is [red]not finite[/red]" in plain  # no markup
    last = plain[plain.rindex("step 20/20") :]
    assert "loss 2.0000   held out 1.5000 bits/byte" in last and "100%" in last
    assert plain.endswith("\n")


def test_no_color_is_kept(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    tracker = live(stream)
    tracker.show({}, np.array([[0.9, 0.1, 0.0]]))
    tracker.log(10, NUMBERS)
    tracker.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue())
    assert DEAD in stream.getvalue() and BLOCKS[7] in stream.getvalue()


def test_prints_and_log_records_go_above_the_view_and_the_streams_come_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, errors = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(sys, "__stderr__", errors)
    handler = logging.StreamHandler(errors)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    tracker = LiveTracker(20, width=90)
    tracker.start(0)
    print("printed meanwhile")
    logging.getLogger("anywhere").warning("logged meanwhile")
    tracker.close()
    assert sys.stdout is terminal and sys.stderr is errors and handler.stream is errors
    assert errors.getvalue() == ""
    plain = ESCAPE.sub("", terminal.getvalue())
    for words in ("printed meanwhile", "logged meanwhile"):
        assert words in plain and plain.rindex(words) < plain.rindex("step 0/20")


@pytest.mark.parametrize(
    ("variables", "is_tty", "encoding", "expected"),
    [
        ({"TERM": "xterm"}, True, "utf-8", True),
        ({"TERM": "xterm"}, False, "utf-8", False),
        ({"TERM": "xterm", "CI": "true"}, True, "utf-8", False),
        ({"TERM": "dumb"}, True, "utf-8", False),
        ({}, True, "utf-8", False),
        ({"TERM": "xterm"}, True, "ascii", False),
    ],
)
def test_who_is_watched(variables, is_tty, encoding, expected):
    stream = Terminal()
    stream.isatty = lambda: is_tty
    stream.encoding = encoding
    assert is_watched(stream, variables) is expected


def test_the_choice_of_a_console(monkeypatch, caplog):
    for name, value in {"TERM": "xterm", "CI": ""}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(open_console("none", 10, Terminal()), SilentConsole)
    assert isinstance(open_console("plain", 10, Terminal()), ConsoleTracker)
    assert isinstance(open_console("auto", 10, io.StringIO()), ConsoleTracker)
    assert isinstance(open_console("auto", 10, Terminal()), LiveTracker)
    assert isinstance(open_console("rich", 10, io.StringIO()), LiveTracker)
    ascii_only = Terminal()
    ascii_only.encoding = "ascii"
    with pytest.raises(ValueError, match="needs a UTF-8 terminal, and this one is ascii"):
        open_console("rich", 10, ascii_only)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(MissingPackageError, match=re.escape("pip install 'jaxmoe[train]'")):
        open_console("rich", 10, Terminal())
    assert isinstance(open_console("auto", 10, Terminal()), ConsoleTracker)
    assert "rich is not installed" in caplog.text and "a line at a time" in caplog.text


@pytest.mark.parametrize("tracker", [ConsoleTracker, LiveTracker])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_closed_pipe_or_terminal_ends_the_lines_and_not_the_run(tracker, number, caplog):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(number, "the reader is gone")

    console = tracker(10, Closed())
    console.start(0)
    console.log(1, {LOSS: 1.0})
    console.log_text(1, "warning", "careful")
    console.log(2, {LOSS: 1.0})
    console.close()
    assert len(caplog.records) == 1 and "goes on without progress" in caplog.text


# Draws under a real terminal and is killed in the middle: `os._exit` is what a second Ctrl-C does.
KILLED = """
import os, numpy
from jaxmoe.tracking.terminal import open_console
console = open_console("auto", 100)
console.start(0)
console.show({}, numpy.full((2, 4), 0.25))
console.log(50, {"train/loss": 2.5})
os._exit(9)
"""


def test_under_a_real_terminal_nothing_needs_repair():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    environment.pop("CI", None)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=os.path.dirname(
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        ),
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux, once the other end is closed
            break
        if not data:
            break
        output += data
    os.close(ours)
    assert process.wait(timeout=60) == 9
    text = output.decode()
    assert "step 50/100" in ESCAPE.sub("", text) and "loss 2.5000" in ESCAPE.sub("", text)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is on
    assert "1049" not in text  # and there was no other screen
