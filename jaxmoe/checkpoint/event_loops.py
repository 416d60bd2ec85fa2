# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes Orbax wait for all writes of a save that has failed.

Orbax (0.12) runs the writes of a save in an event loop, which it closes at the first error. The
writes that are still in progress report to the closed loop: each prints a traceback, "Event loop is
closed", and a thread that waits for one of them waits for ever. `wait_for_all_writes` replaces that
function of Orbax by one that first waits for the other writes.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_MODULE, _NAME = "orbax.checkpoint._src.asyncio_utils", "_run_sync_via_new_loop"

_SECONDS = 60.0
"""Timeout of the writes that are in progress when another one fails."""


def wait_for_all_writes() -> None:
    """Replace the function of Orbax; a no-op with a version that has no such function."""
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError:
        return
    if hasattr(module, _NAME):
        setattr(module, _NAME, run_to_the_end)


def run_to_the_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a new event loop, which is closed when all of its tasks have ended.

    Args:
        coroutine: Coroutine to run.

    Returns:
        The result of the coroutine.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        main = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(main)
        finally:
            left = asyncio.all_tasks(loop) - {main}
            if main.done() and left:  # not done: a signal has interrupted it
                ended, _ = loop.run_until_complete(asyncio.wait(left, timeout=_SECONDS))
                for task in ended:  # the first error is raised; asyncio logs others that are unread
                    _ = task.cancelled() or task.exception()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
