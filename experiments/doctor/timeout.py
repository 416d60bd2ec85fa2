# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`answer_within`: ends the doctor when devices do not answer."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import write
from experiments.doctor.software import Finding, in_words


def check_timeout(seconds: float) -> None:
    """Refuse a time that no thread can wait for.

    Args:
        seconds: Value of the field timeout.

    Raises:
        ValueError: It is not above 0, or too long.
    """
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout={seconds:g} must be above 0 seconds, and at most {threading.TIMEOUT_MAX:.0f}"
        )


@contextlib.contextmanager
def answer_within(seconds: float) -> Iterator[None]:
    """End the process when the block takes too long: a hanging collective cannot be stopped.

    Args:
        seconds: Longest time of the block.
    """

    def give_up() -> None:
        finding = Finding(
            "problem",
            "devices",
            f"no answer within {seconds:g} s: a process or a device is missing, or hangs",
            "check that the same command runs on every host; --timeout sets a longer limit",
        )
        write(in_words(finding))
        os._exit(int(ExitCode.BAD_CONFIGURATION))

    timer = threading.Timer(seconds, give_up)
    timer.name = "timeout of the doctor"
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
