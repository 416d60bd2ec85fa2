# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What an entry point does to its process."""

import io
import logging
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from experiments.cli.absent_tpu import has_tpu
from experiments.cli.process import configure_logging, end_at_once
from jaxmoe.resilience.stop import StopRequest


def test_warnings_are_plain_words_whoever_was_here_first(monkeypatch):
    stream = io.StringIO()
    first = logging.StreamHandler(stream)
    first.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    monkeypatch.setattr(logging.root, "handlers", [first])
    configure_logging()
    logging.getLogger("jaxmoe.anywhere").warning("careful")
    assert stream.getvalue() == "WARNING: careful\n"


def test_commands_are_silent_about_libtpu_where_no_tpu_is():
    pytest.importorskip("libtpu", reason="its warnings need libtpu: pip install 'jaxmoe[plan]'")
    if has_tpu():
        pytest.skip("this machine has a TPU")
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS" and "TPU" not in k}
    program = "from experiments.cli.process import start_process; start_process()"
    root = pathlib.Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", program], env=kept, cwd=root, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"dev/accel0": ""}, True),
        ({"dev/vfio/vfio": ""}, False),
        ({"dev/vfio/0": ""}, True),
        (
            {"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/class": "0x0200"},
            False,
        ),
        (
            {"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/class": "0x0880"},
            True,
        ),
        ({"sys/bus/pci/devices/0/vendor": "0x1ae0\n"}, True),
        (
            {"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x03"},
            False,
        ),
    ],
)
def test_a_tpu_is_never_overlooked(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert has_tpu(tmp_path) is expected


def test_second_signal_ends_a_command_with_128_plus_its_number(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with StopRequest(on_second=end_at_once):
        signal.raise_signal(signal.SIGTERM)
        assert codes == []
        signal.raise_signal(signal.SIGINT)
    assert codes == [128 + signal.SIGINT]
