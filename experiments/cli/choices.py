# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the choices between config classes in a config, and makes those of a command line.

--dotted.field NAME           a member of a union, by its key in the registry
dotted.field:NAME             the same
--dotted.field NAME ...       a tuple of members; none: the empty tuple
--dotted.field.only_here 3    implies the only member that has such a field
--dotted.NAME.field 3         of a tuple of members beside it: adds NAME, unless it is there
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from jaxmoe.configs import (
    alternatives,
    closest,
    config_classes,
    field_types,
    is_config,
    registry_name,
)

Config = TypeVar("Config")

_LONGEST_TUPLE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class FieldChoice:
    """Field, or item of a tuple, whose value is one of several config classes."""

    path: str
    members: Mapping[str, Any]
    """Config classes by name."""
    is_tuple: bool = False
    is_optional: bool = False

    def __str__(self) -> str:
        names = " | ".join([*self.members, *["none"] * self.is_optional])
        return f"--{self.path} {names}" if self.is_tuple else f"{self.path}:{names}"


def find_choices(config: Any, prefix: str = "") -> Iterator[FieldChoice]:
    """Yield the choices of a config and of the values chosen, parents first."""
    for key, hint in field_types(type(config)).items():
        value = getattr(config, key)
        path = prefix + key
        options = alternatives(hint)
        items = next((get_args(o)[0] for o in options if get_origin(o) is tuple), None)
        members = _members(hint if items is None else items)
        if members and (len(options) > 1 or None not in config_classes(items or hint)):
            yield FieldChoice(path, members, items is not None, type(None) in options)
        for index, item in enumerate((value or ()) if items is not None else ()):
            if dataclasses.is_dataclass(item):
                yield FieldChoice(f"{path}.{index}", members)
                yield from find_choices(item, f"{path}.{index}.")
        if dataclasses.is_dataclass(value):
            yield from find_choices(value, f"{path}.")


def _members(hint: Any) -> Mapping[str, Any]:
    """Return the config classes of an annotation by name; a lone class has one of its own."""
    classes = config_classes(hint)
    if None not in classes:
        return classes
    return {_member_name(cls): cls for cls in filter(dataclasses.is_dataclass, alternatives(hint))}


def nested_configs(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config and the configs in its fields and tuples, each after its dotted path."""
    yield path, config
    for key in field_types(type(config)):
        value = getattr(config, key)
        below = f"{path}.{key}" if path else key
        items = enumerate(value) if isinstance(value, tuple) else ()
        for name, item in [(below, value), *((f"{below}.{index}", item) for index, item in items)]:
            if dataclasses.is_dataclass(item):
                yield from nested_configs(item, name)


def own_paths(config: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields of a config and of the configs in it.

    Args:
        config: Config; any other value has no fields.
        path: Dotted path of the config.
    """
    if dataclasses.is_dataclass(config):
        for above, value in nested_configs(config, path):
            prefix = f"{above}." if above else ""
            yield from (prefix + key for key in field_types(type(value)))


def field_paths(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields, of all members of unions."""
    for key, hint in field_types(cls).items():
        yield prefix + key
        for option in alternatives(hint):
            if get_origin(option) is tuple:
                for member in config_classes(get_args(option)[0]).values():
                    for index in range(_LONGEST_TUPLE):
                        yield from field_paths(member, f"{prefix}{key}.{index}.")
            elif is_config(option):
                for member in config_classes(option).values():
                    yield from field_paths(member, f"{prefix}{key}.")


def choose(config: Config, arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """Make the choices of a command line.

    Args:
        config: The config whose values are the defaults. A member it already has keeps its values.
        arguments: The arguments. The last of a repeated choice counts.

    Returns:
        The config with the members that are named or implied, and with what these bring (such as
        the optimiser of an estimator); not validated: `__post_init__` must not check before all
        flags are read. And the other arguments.

    Raises:
        ValueError: A name is unknown, or a flag belongs to a member that is not chosen.
    """
    remaining = list(arguments)
    choices = {}
    for word in arguments:
        spelled = word.partition("=")[0] if word.startswith("--") else word
        choices[_field(spelled.partition(":")[0].removeprefix("--"))] = spelled
    seen: set[str] = set()
    while choice := next((c for c in find_choices(config) if c.path not in seen), None):
        seen.add(choice.path)
        keys = choice.path.split(".")
        old = _value_at(config, keys)
        if choice.is_tuple:
            names, remaining = _take_items(choice, remaining)
            if names is not None:
                classes = [choice.members[name] for name in names]
                new = (next((i for i in old if type(i) is cls), None) or cls() for cls in classes)
                config = with_value(config, keys, tuple(new))
            config, remaining = _add_items(choice, config, remaining)
            continue
        chosen, remaining = _take_member(choice, remaining)
        current = _member_name(type(old)) if dataclasses.is_dataclass(old) else "none"
        name = _imply(choice, chosen, current, old, choices)
        if name != current:
            member = None if name == "none" else choice.members[name]
            config = with_value(config, keys, None if member is None else member())
            for path, value in getattr(member, "brings", {}).items():
                config = _bring(config, choice.path, path, value, seen)
    return config, remaining


def _bring(config: Config, chosen: str, path: str, value: Any, seen: set[str]) -> Config:
    """Return the config with a value that comes with a member, unless a choice was made there.

    Args:
        config: Config.
        chosen: Path of the choice of the member.
        path: Path of the value in the config of a run, which is the whole config or a part of it.
        value: The value.
        seen: Paths of the choices that were made before.
    """
    *root, _, _ = chosen.split(".")
    keys = [*root, *path.split(".")]
    if ".".join(keys) in seen or not hasattr(_value_at(config, [*root]), keys[len(root)]):
        return config
    return with_value(config, keys, value)


def known_spelling(word: str, names: Mapping[str, Any]) -> str:
    """Return the name that a word spells with `_` or `-`; else the word."""
    return {_field(name): name for name in names}.get(_field(word), word)


def _take_items(choice: FieldChoice, arguments: list[str]) -> tuple[list[str] | None, list[str]]:
    """Return the names after the last `--dotted.tuple`, None without one, and the other words."""
    chosen = None
    remaining = []
    while arguments:
        word, *arguments = arguments
        if not word.startswith("--") or _field(word[2:]) != choice.path:
            remaining.append(word)
            continue
        chosen = []
        while arguments and not arguments[0].startswith("-") and ":" not in arguments[0]:
            word, *arguments = arguments
            chosen.append(_name_of(choice, word, f"--{choice.path}"))
    return chosen, remaining


def _add_items(
    choice: FieldChoice, config: Config, arguments: list[str]
) -> tuple[Config, list[str]]:
    """Return the config with the items that flags name, and these flags by the place of the item.

    With a tuple `parts`, `--snapshots.every 3` adds the item `snapshots`: `--parts.0.every 3`.
    """
    *above, _ = keys = choice.path.split(".")
    fields = field_types(type(_value_at(config, above)))
    remaining = []
    for word in arguments:
        *path, name, field = ["", *_field(word.partition("=")[0].removeprefix("--")).split(".")]
        is_item = word.startswith("--") and path[1:] == above and name in choice.members
        if not is_item or name in fields:
            remaining.append(word)
            continue
        items = _value_at(config, keys)
        places = [_member_name(type(item)) for item in items]
        if name not in places:
            config = with_value(config, keys, (*items, choice.members[name]()))
            places.append(name)
        _, equals, value = word.partition("=")
        remaining.append(f"--{choice.path}.{places.index(name)}.{field}{equals}{value}")
    return config, remaining


def _take_member(choice: FieldChoice, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the name that the last word or flag of a choice gives, and the other words.

    The name is None without one. Both `dotted.field:NAME` and `--dotted.field NAME` are read.
    """
    chosen = None
    remaining = []
    while arguments:
        word, *arguments = arguments
        path, colon, name = word.partition(":")
        flag, equals, value = word.partition("=")
        if word.startswith("--") and _field(flag[2:]) == choice.path:
            if not equals:
                value, arguments = (arguments[0], arguments[1:]) if arguments else ("", [])
            if not value or value.startswith("-"):
                raise ValueError(f"{flag} needs a name\nchoices: {', '.join(choice.members)}")
            chosen = _name_of(choice, value, flag)
        elif colon and _field(path) == choice.path:
            chosen = _name_of(choice, name, f"{choice.path}:")
        else:
            remaining.append(word)
    return chosen, remaining


def _name_of(choice: FieldChoice, word: str, where: str) -> str:
    """Return the name that a word spells."""
    name = known_spelling(word, choice.members)
    if name in choice.members or (choice.is_optional and name == "none"):
        return name
    names = ", ".join(choice.members)
    if len(choice.members) == 1 and choice.is_optional and not closest(name, choice.members):
        (cls,) = choice.members.values()  # off by default
        flags = [f"--{choice.path}.{field}" for field in field_types(cls)]
        if flags:
            raise ValueError(
                f"{where} is a group of flags: did you mean {flags[0]} {word}?\n"
                f"flags: {', '.join(flags)}"
            )
    if any(mark in word for mark in "/.*") and "path" in _field_names(choice):
        raise ValueError(f"{where} has no {word!r}: did you mean --{choice.path}.path {word}?")
    raise ValueError(f"{where} has no {word!r}{closest(name, choice.members)}\nchoices: {names}")


def _field_names(choice: FieldChoice) -> set[str]:
    """Return the names of the fields of all members of a choice."""
    return {key for member in choice.members.values() for key in field_types(member)}


def _imply(
    choice: FieldChoice, chosen: str | None, current: str, value: Any, choices: Mapping[str, str]
) -> str:
    """Return the member that has the fields which the arguments name.

    The other members are imported only if the arguments name a field that the value does not have.

    Args:
        choice: A choice that is no tuple.
        chosen: The member that the arguments name; None if they leave it open.
        current: The member of the config, kept if it has the fields.
        value: The value of the config.
        choices: The arguments by field, for messages.

    Raises:
        ValueError: It has not all of them, or several other members have.
    """
    beneath = {field for field in choices if field.startswith(f"{choice.path}.")}
    if chosen in (None, current) and beneath <= set(own_paths(value, choice.path)):
        return current
    if chosen is not None and not beneath:
        return chosen
    fields = {
        name: set(field_paths(member, f"{choice.path}.")) for name, member in choice.members.items()
    }
    fields_set = {
        field
        for field in choices
        if any(field in member_fields for member_fields in fields.values())
    }
    name = chosen or current
    if fields_set <= fields.get(name, set()):
        return name
    fitting = [name for name, member_fields in fields.items() if fields_set <= member_fields]
    if len(fitting) > 1:  # a member may ask to be named where others have the same fields
        implied = [name for name in fitting if getattr(choice.members[name], "is_implied", True)]
        fitting = implied or fitting
    if chosen is None and len(fitting) == 1:
        return fitting[0]
    lines = [
        f"{choices[field]} belongs to "
        + " or ".join(
            f"{choice.path}:{name}"
            for name, member_fields in fields.items()
            if field in member_fields
        )
        for field in sorted(fields_set)
        if chosen is None or field not in fields.get(chosen, set())
    ]
    if chosen is not None:
        lines.append(f"{choice.path}:{chosen} is chosen: leave out one of them")
    else:
        lines.append("say which" if fitting else "choose one")
    raise ValueError("; ".join(lines))


def _field(word: str) -> str:
    return word.replace("-", "_")


def _member_name(cls: Any) -> str:
    """Return the name in the registry; for a lone class, its own in lower case."""
    return registry_name(cls) or cls.__name__.removesuffix("Config").lower()


def _value_at(config: Any, keys: Sequence[str]) -> Any:
    """Return the value at a dotted path, whose digits are positions in tuples."""
    for key in keys:
        config = config[int(key)] if isinstance(config, tuple) else getattr(config, key)
    return config


def with_value(config: Any, keys: Sequence[str], value: Any) -> Any:
    """Return a copy with another value at a dotted path, not validated.

    Args:
        config: Config.
        keys: Names of fields, and positions in tuples.
        value: The other value.
    """
    if not keys:
        return value
    new = with_value(_value_at(config, keys[:1]), keys[1:], value)
    if isinstance(config, tuple):
        return (*config[: int(keys[0])], new, *config[int(keys[0]) + 1 :])
    changed = copy.copy(config)
    object.__setattr__(changed, keys[0], new)  # dataclasses.replace would validate
    return changed
