# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Choices that a config may make, and rows of two that do not combine; see `jaxmoe.combinations`.

    Row(above("execution.mesh.stage", 1), member("optimizer", "mkor"), reason, way_out)

A choice is a dotted path from the config of a run and a test of the value there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A choice that a config may make.

    Attributes:
        path: Dotted path of the value, from the config of a run. Where it passes through a tuple,
            one item is enough.
        words: What the value is, for the page of combinations: `2`, `above 1`.
        test: Whether a value is this choice.
        shown: Path in messages, where it is another: a field below the path, or another name of the
            value.
        needs: First names of the fields that the test of a whole config reads, whose path is empty.
    """

    path: str
    words: str
    test: Callable[[Any], bool]
    shown: str = ""
    needs: tuple[str, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """First names of the fields without which it is not tested."""
        return frozenset(self.needs or (self.path.partition(".")[0],))

    @property
    def reads(self) -> frozenset[str]:
        """First names of the fields that the test reads; an empty one for a whole config."""
        return frozenset((self.path.partition(".")[0], *self.needs))

    def is_made(self, values: Mapping[str, tuple[Any, ...]]) -> bool:
        """Whether a config with these values by dotted path makes this choice."""
        return any(map(self.test, values[self.path]))

    def spelling(self, config: Any) -> str | None:
        """Return path and value in a config, None where it does not make this choice.

        Args:
            config: Config of a run, or a namespace with some of its fields.
        """
        for value in values_at(config, self.path):
            if self.test(value):
                if self.shown.startswith(self.path):
                    value = next(iter(values_at(config, self.shown)), value)
                return spell_choice(self.shown or self.path, value)
        return None

    @property
    def text(self) -> str:
        """Path and words, for the page."""
        return f"`{self.shown or self.path}` {self.words}"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Two choices that do not combine.

    Attributes:
        first: A choice.
        second: A choice of another field.
        reason: Why not, a clause with `{first}` and `{second}`.
        way_out: What to choose instead; it may have `{first}` and `{second}`.
    """

    first: Choice
    second: Choice
    reason: str
    way_out: str

    def refusal(self, config: Any) -> str | None:
        """Return the message for a config that makes both choices, else None.

        Args:
            config: Config of a run, or a namespace with some of its fields.
        """
        first = self.first.spelling(config)
        second = None if first is None else self.second.spelling(config)
        if second is None:
            return None
        return f"{self.reason}: {self.way_out}".format(first=first, second=second)

    @property
    def fields(self) -> frozenset[str]:
        """First names of the two paths."""
        return self.first.fields | self.second.fields


def values_at(config: Any, path: str) -> tuple[Any, ...]:
    """Return the values at a dotted path: None where the path ends early, each item of a tuple.

    Args:
        config: A config, or a namespace of configs.
        path: Names of fields; empty for the config itself, `*` at the end for the items of a tuple.
    """
    value = config
    for name, below in _names(path):
        value = getattr(value, name, None)
        if below and isinstance(value, tuple):
            return tuple(item for inner in value for item in values_at(inner, below))
    return (value,)


@functools.cache
def _names(path: str) -> tuple[tuple[str, str], ...]:
    """Return the names of a path, each with the path below it."""
    name, _, below = path.partition(".")
    return () if name in ("", "*") else ((name, below), *_names(below))


def spell_choice(path: str, value: Any) -> str:
    """Return a choice as a user types it: `path:name` of a member, `path=value` of a number."""
    name = getattr(value, "name", None)
    return f"{path}:{name}" if isinstance(name, str) else f"{path}={value}"


def equals(path: str, *values: Any) -> Choice:
    """Return the choice of one of some values."""
    return Choice(path, " or ".join(map(str, values)), lambda value: value in values)


def differs(path: str, *values: Any) -> Choice:
    """Return the choice of a value that is none of some; None is no choice."""
    words = f"other than {' or '.join(map(str, values))}" if values else "set"
    return Choice(path, words, lambda value: value is not None and value not in values)


def above(path: str, limit: int) -> Choice:
    """Return the choice of a number above another."""
    return Choice(path, f"above {limit}", lambda value: value is not None and value > limit)


def is_set(path: str) -> Choice:
    """Return the choice of any value but None, 0, False and what is empty."""
    return Choice(path, "set", bool)


def unset(path: str) -> Choice:
    """Return the choice of None, 0, False or what is empty."""
    return Choice(path, "not set", lambda value: not value)


def member(path: str, *names: str, shown: str = "") -> Choice:
    """Return the choice of one of some members of a kind, by name."""
    words = " or ".join(f"`{name}`" for name in names)
    return Choice(path, words, lambda value: getattr(value, "name", None) in names, shown)


def no_member(path: str, *names: str) -> Choice:
    """Return the choice of a member that is none of some; None is no choice."""
    words = f"other than {' or '.join(f'`{name}`' for name in names)}"
    return Choice(path, words, lambda value: value is not None and value.name not in names)


def trait(path: str, attribute: str, words: str, *, value: bool = True, shown: str = "") -> Choice:
    """Return the choice of a member with an attribute that is true, or false."""
    return Choice(
        path,
        words,
        lambda member: member is not None and bool(getattr(member, attribute)) == value,
        shown,
    )


def that(
    path: str,
    words: str,
    test: Callable[[Any], bool],
    shown: str = "",
    needs: tuple[str, ...] = (),
) -> Choice:
    """Return the choice of a member that passes a test; None is no choice.

    Args:
        path: Dotted path of the member; empty for the whole config.
        words: What such a member is: `with pages`.
        test: Test of a member.
        shown: Path of the value in messages, where it is another.
        needs: First names of the fields that the test of a whole config reads.
    """
    return Choice(path, words, lambda value: value is not None and bool(test(value)), shown, needs)
