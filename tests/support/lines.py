# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the lines of the library that some work runs, a cost that no other load changes."""

import sys

import jaxmoe


def lines_of(work):
    """Return how many lines of the library some work runs in this thread."""
    root, count = jaxmoe.__path__[0], 0

    def trace(frame, event, argument):
        nonlocal count
        del argument
        if not frame.f_code.co_filename.startswith(root):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
