# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the members of every choice by name: address, one line of what it is, no import.

A choice is a field whose value is one of several config classes: a router, an optimiser, a source
of data. Its kind is a word such as "router"; the type of the field is the base class of the kind.
`layers.py`, `executions.py`, `runs.py` and `serving.py` list the members. Config files, command
lines, `--help` and the contract tests ask here, and a member is imported when it is named:

    choice("router", "sigmoid_topk")         # the class SigmoidTopKConfig
    add("router", "nearest", "nearest_router:NearestConfig", "The nearest experts.")

An installed package adds members by entry points of the group `jaxmoe.catalog`, whose name is the
kind and the name of the member:

    [project.entry-points."jaxmoe.catalog"]
    "router.nearest" = "nearest_router:NearestConfig"

To add a member: its config, which extends the base class of the kind, and its row in one of the
four files.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from jaxmoe.catalog import executions, layers, runs, serving

GROUP: Final = "jaxmoe.catalog"
"""Group of the entry points of other packages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """Where a config class is, and what it is.

    Attributes:
        address: `package.module:Class`.
        line: One line about it.
    """

    address: str
    line: str


BASES: Final[Mapping[str, str]] = {
    **layers.BASES,
    **executions.BASES,
    **runs.BASES,
    **serving.BASES,
}
"""Address of the base class of each kind, which is the type of the fields."""

_MEMBERS: Final[dict[str, dict[str, Member]]] = {
    kind: {name: Member(*row) for name, row in rows.items()}
    for source in (layers, executions, runs, serving)
    for kind, rows in source.MEMBERS.items()
}
_KINDS: Final = {address: kind for kind, address in BASES.items()}


class Registry(Mapping[str, Any]):
    """Members of a kind by name, each imported when it is looked up.

    Args:
        kind: Kind of the choice.
    """

    def __init__(self, kind: str):
        _check_kind(kind)
        self.kind = kind

    def __getitem__(self, name: str) -> Any:
        if name not in _members(self.kind):
            raise KeyError(name)
        return choice(self.kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_members(self.kind))

    def __len__(self) -> int:
        return len(_members(self.kind))

    def __contains__(self, name: object) -> bool:
        return name in _members(self.kind)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"


def kinds() -> tuple[str, ...]:
    """Return the kinds of choices."""
    return tuple(BASES)


def names(kind: str) -> tuple[str, ...]:
    """Return the names of the members of a kind, those of other packages last.

    Args:
        kind: Kind of the choice, such as "router".

    Raises:
        ValueError: There is no such kind.
    """
    return tuple(_members(kind))


def line(kind: str, name: str) -> str:
    """Return one line about a member, without importing it.

    Args:
        kind: Kind of the choice.
        name: Name of the member.

    Raises:
        ValueError: There is no such kind or member.
    """
    return _member(kind, name).line


def choice(kind: str, name: str) -> Any:
    """Import a member.

    Args:
        kind: Kind of the choice.
        name: Name of the member.

    Returns:
        Its config class.

    Raises:
        ValueError: There is no such kind or member, or its address does not lead to a config class
            of this kind and name.
    """
    address = _member(kind, name).address
    cls = _load(address, f"{kind} {name!r}")
    base = _load(BASES[kind], kind)
    if not (isinstance(cls, type) and issubclass(cls, base) and dataclasses.is_dataclass(cls)):
        raise ValueError(
            f"{kind} {name!r} is {address}, which is no dataclass that extends {BASES[kind]}"
        )
    if getattr(cls, "name", None) != name:
        raise ValueError(
            f"{kind} {name!r} is {address}, whose name is {getattr(cls, 'name', None)!r}: write"
            f" name: ClassVar[str] = {name!r}"
        )
    return cls


def kind_of(base: Any) -> str | None:
    """Return the kind that a class is the base class of, None for any other value."""
    module = getattr(base, "__module__", "")
    name = getattr(base, "__qualname__", "")
    return _KINDS.get(f"{module}:{name}")


def add(kind: str, name: str, address: str, line: str) -> None:
    """Add a member for the rest of the process, which a notebook or a test may do.

    Adding the same member again does nothing.

    Args:
        kind: Kind of the choice.
        name: Name of the member, the `name` of its config class.
        address: `package.module:Class` of the config class; nothing is imported yet.
        line: One line about it.

    Raises:
        ValueError: There is no such kind, another member has the name, or the address has no colon.
    """
    _add(_members(kind), kind, name, Member(address, line))


def _add(members: dict[str, Member], kind: str, name: str, member: Member) -> None:
    module, _, attribute = member.address.partition(":")
    if not (module and attribute):
        raise ValueError(f"{kind} {name!r} is {member.address!r}, which is no package.module:Class")
    if name in members and members[name].address != member.address:
        raise ValueError(
            f"{kind} {name!r} is {members[name].address} already, not {member.address}: choose"
            " another name"
        )
    members[name] = member


def _member(kind: str, name: str) -> Member:
    members = _members(kind)
    if name not in members:
        raise ValueError(
            f"there is no {kind} {name!r}{_near(name, members)} (there is {', '.join(members)})"
        )
    return members[name]


def _members(kind: str) -> dict[str, Member]:
    """Return the members of a kind, those of the installed packages too."""
    _check_kind(kind)
    _read_entry_points()
    return _MEMBERS[kind]


def _check_kind(kind: str) -> None:
    if kind not in BASES:
        raise ValueError(
            f"there is no kind {kind!r} of choice{_near(kind, BASES)} (there is {', '.join(BASES)})"
        )


@functools.cache
def _read_entry_points() -> None:
    """Add the members of the installed packages, once."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = entry.dist.name if entry.dist is not None else entry.value
        summary = (entry.dist.metadata["Summary"] if entry.dist is not None else "") or ""
        kind, _, name = entry.name.partition(".")
        if kind not in BASES or not name:
            raise ValueError(
                f"the package {package} adds {entry.name!r} to {GROUP}: its name must be"
                f" kind.name, where the kind is one of {', '.join(BASES)}"
            )
        _add(_MEMBERS[kind], kind, name, Member(entry.value, summary or f"From {package}."))


def _load(address: str, subject: str) -> Any:
    """Return what is at an address."""
    module, _, attribute = address.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{subject} cannot be imported from {address}: {error}") from error


def _near(word: str, candidates: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else ""
