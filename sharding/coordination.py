# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What processes tell one another without a device: meeting points with names, and short texts.

Everything goes through the coordination service of `jax.distributed`, which lives in process 0: no
collective, so that a process that never comes is named after a time instead of being waited for.

    barrier("before the first step", 600)     all have come, or an error that says who has not
    everyones_text("verdict", text, 600)      what each process says
    first_text("config", text, 600)           what process 0 says

With one process each returns at once. It does not carry arrays: for those see `gather` in
`sharding/distributed.py`. The service keeps every text until the job ends, so that they should be
few and short.
"""

from __future__ import annotations

import collections

import jax

from pallas_kernels.jax_versions import coordination_client

ROOT = "jaxmoe"
"""Before the name of each key, apart from those of JAX and Orbax."""

_uses: collections.Counter[str] = collections.Counter()


class AbsentError(Exception):
    """A process did not come to where the others wait for it."""


def barrier(name: str, seconds: float) -> None:
    """Waits until every process is here; each must call this with the same names in one order.

    Args:
        name: in words, for the error.
        seconds: that it waits.

    Raises:
        AbsentError: naming the processes that did not come.
    """
    if jax.process_count() > 1:
        _meet(_path("barrier", name), name, seconds)


def first_text(name: str, text: str, seconds: float) -> str:
    """The text of process 0, on all processes.

    Args:
        name: of what is said, in words.
        text: of this process; only that of process 0 is passed on.
        seconds: that the others wait for it.

    Raises:
        AbsentError: process 0 has not said it in time.
    """
    if jax.process_count() == 1:
        return text
    client, path = coordination_client(), _path("first", name)
    if jax.process_index() == 0:
        client.key_value_set(path, text)
        return text
    try:
        return client.blocking_key_value_get(path, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        raise AbsentError(_sentence([0], name, seconds)) from error


def everyones_text(name: str, text: str, seconds: float) -> list[str]:
    """The texts of all processes, on all processes.

    Args:
        name: of what is said, in words.
        text: of this process.
        seconds: that it waits for the others.

    Raises:
        AbsentError: naming the processes that did not come.
    """
    if jax.process_count() == 1:
        return [text]
    path = _path("texts", name)
    coordination_client().key_value_set(f"{path}/said/{jax.process_index()}", text)
    _meet(path, name, seconds)
    said = entries(f"{path}/said")
    return [said[process] for process in range(jax.process_count())]


def publish(name: str, text: str) -> None:
    """Says something of this process that may be said anew, without waiting for anybody.

    Args:
        name: of what is said; see `entries`.
        text: of this process.
    """
    say_of(name, jax.process_index(), text)


def say_of(name: str, process: int, text: str) -> None:
    """The same about another process.

    Args:
        name: of what is said.
        process: of which.
        text: about it.
    """
    key = f"{ROOT}/{name}/{process}" if not name.startswith(ROOT) else f"{name}/{process}"
    coordination_client().key_value_set(key, text, allow_overwrite=True)


def entries(name: str) -> dict[int, str]:
    """What has been said under this name so far, by process.

    Args:
        name: of what is said.
    """
    folder = name if name.startswith(ROOT) else f"{ROOT}/{name}"
    found = coordination_client().key_value_dir_get(folder + "/")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def _path(kind: str, name: str) -> str:
    """A key that no other use has: a name may come again."""
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
        if not absent:  # the last came when the time was up, or the service is gone
            raise
        raise AbsentError(_sentence(absent, name, seconds)) from error


def _sentence(absent: list[int], name: str, seconds: float) -> str:
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    which = "process" if len(absent) == 1 else "processes"
    return f"{which} {shown} did not come to {name!r} within {seconds:g} s"
