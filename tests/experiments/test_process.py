# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What an entry point does to its process."""

import io
import logging

from experiments.cli.process import configure_logging


def test_warnings_are_plain_words_whoever_was_here_first(monkeypatch):
    stream = io.StringIO()
    first = logging.StreamHandler(stream)
    first.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    monkeypatch.setattr(logging.root, "handlers", [first])
    configure_logging()
    logging.getLogger("jaxmoe.anywhere").warning("careful")
    assert stream.getvalue() == "WARNING: careful\n"
