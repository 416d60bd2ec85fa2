# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What an entry point does to its process."""

import io
import logging
import os
import signal

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


def test_second_signal_ends_a_command_with_128_plus_its_number(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with StopRequest(on_second=end_at_once):
        signal.raise_signal(signal.SIGTERM)
        assert codes == []
        signal.raise_signal(signal.SIGINT)
    assert codes == [128 + signal.SIGINT]
