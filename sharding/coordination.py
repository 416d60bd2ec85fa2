# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Barriers and short texts between processes, without a device.

All calls use the coordination service of `jax.distributed`, which runs in process 0, and no
collective: a process that never arrives is named after a timeout.

    barrier("before the first step", 600)     all have arrived, or an error that names the absent
    everyones_text("verdict", text, 600)      the text of each process
    first_text("config", text, 600)           the text of process 0

With one process each returns at once. For arrays see `gather` in `sharding/distributed.py`. The
service keeps every text until the job ends: send few and short ones.
"""

from __future__ import annotations

import collections

import jax

from pallas_kernels.jax_versions import coordination_client

ROOT = "jaxmoe"
"""Prefix of every key, distinct from those of JAX and Orbax."""

_uses: collections.Counter[str] = collections.Counter()


class AbsentError(Exception):
    """A process did not reach a barrier within the timeout."""


def barrier(name: str, seconds: float) -> None:
    """Wait until every process is here; each must call this with the same names in one order.

    Args:
        name: Description of the barrier, for the error.
        seconds: Timeout.

    Raises:
        AbsentError: Some processes did not arrive; the message names them.
    """
    if jax.process_count() > 1:
        _meet(_path("barrier", name), name, seconds)


def first_text(name: str, text: str, seconds: float) -> str:
    """Return the text of process 0, on all processes.

    Args:
        name: Description of the text, for the error.
        text: Text of this process; only that of process 0 is returned.
        seconds: Timeout.

    Raises:
        AbsentError: Process 0 has not sent it in time.
    """
    if jax.process_count() == 1:
        return text
    client = coordination_client()
    path = _path("first", name)
    if jax.process_index() == 0:
        client.key_value_set(path, text)
        return text
    try:
        return client.blocking_key_value_get(path, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        raise AbsentError(_sentence([0], name, seconds)) from error


def everyones_text(name: str, text: str, seconds: float) -> list[str]:
    """Return the texts of all processes, on all processes.

    Args:
        name: Description of the texts, for the error.
        text: Text of this process.
        seconds: Timeout.

    Raises:
        AbsentError: Some processes did not arrive; the message names them.
    """
    if jax.process_count() == 1:
        return [text]
    path = _path("texts", name)
    coordination_client().key_value_set(f"{path}/texts/{jax.process_index()}", text)
    _meet(path, name, seconds)
    texts = entries(f"{path}/texts")
    return [texts[process] for process in range(jax.process_count())]


def publish(name: str, text: str) -> None:
    """Publish a text of this process without waiting; a later call replaces it.

    Args:
        name: Key of the texts; see `entries`.
        text: Text of this process.
    """
    say_of(name, jax.process_index(), text)


def say_of(name: str, process: int, text: str) -> None:
    """Publish a text on behalf of another process; see `publish`.

    Args:
        name: Key of the texts.
        process: Index of that process.
        text: The text.
    """
    key = f"{ROOT}/{name}/{process}" if not name.startswith(ROOT) else f"{name}/{process}"
    coordination_client().key_value_set(key, text, allow_overwrite=True)


def entries(name: str) -> dict[int, str]:
    """Return the texts published under a name so far, by process.

    Args:
        name: Key of the texts.
    """
    folder = name if name.startswith(ROOT) else f"{ROOT}/{name}"
    pairs = coordination_client().key_value_dir_get(folder + "/")
    return {int(key.rpartition("/")[2]): text for key, text in pairs}


def _path(kind: str, name: str) -> str:
    """Return a key that no other use has; a name may be used repeatedly."""
    _uses[f"{kind}/{name}"] += 1
    return f"{ROOT}/{kind}/{name.replace(' ', '-')}/{_uses[f'{kind}/{name}']}"


def _meet(path: str, name: str, seconds: float) -> None:
    client = coordination_client()
    client.key_value_set(f"{path}/come/{jax.process_index()}", "")
    try:
        client.wait_at_barrier(path, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        come = entries(f"{path}/come")
        absent = [process for process in range(jax.process_count()) if process not in come]
        if not absent:  # the last arrived as the time was up, or the service is gone
            raise
        raise AbsentError(_sentence(absent, name, seconds)) from error


def _sentence(absent: list[int], name: str, seconds: float) -> str:
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    which = "process" if len(absent) == 1 else "processes"
    return f"{which} {shown} did not come to {name!r} within {seconds:g} s"
