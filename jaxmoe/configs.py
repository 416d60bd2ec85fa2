# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts configs to JSON and back, and provides registries, differences and fingerprints.

A config is a frozen, keyword-only dataclass whose fields are numbers, strings, booleans, None,
`Literal`s, tuples, other configs, or unions of them. A field whose type is the base class of a kind
in `jaxmoe/catalog` holds any member of that kind. A member has `name: ClassVar[str]`, its key in
the registry. In JSON a config is an object with one key per field, a tuple is a list, and a class
with a registry name is tagged with it under `kind` (which no field may be called):

    Model(moe=MoE(top_k=2, router=SoftmaxTopK(order="before")))
    {"moe": {"top_k": 2, "router": {"kind": "softmax_topk", "order": "before"}}}

Reading is strict: every field must be present, with the type of its annotation, and no other.
`experiments/cli` is the command line.

To add a kind of field value: `jaxmoe/configs.py` (`_encode` and `_decode`),
`tests/jaxmoe/test_configs.py` (a round trip).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from jaxmoe import catalog

Config = TypeVar("Config")

TAG = "kind"
"""JSON key of the registry name of a class."""


def registry_of(union: Any) -> Mapping[str, Any]:
    """Return the members of a union of config classes, or of a kind, by their `name`.

    Args:
        union: `A | B | ...`, a single config class, or the base class of a kind.

    Returns:
        `{name: class}`, in the order of the union.
    """
    if (kind := catalog.kind_of(union)) is not None:
        return catalog.Registry(kind)
    members = typing.get_args(union) or (union,)
    return {member.name: member for member in members}


def is_config(hint: Any) -> bool:
    """Return whether an annotation is a config class, or the base class of a kind of them."""
    return dataclasses.is_dataclass(hint) or catalog.kind_of(hint) is not None


def config_classes(hint: Any) -> Mapping[Any, Any]:
    """Return the config classes that a value of an annotation may have, by registry name.

    The members of a kind are imported when they are looked up. The name of a class that is in no
    registry is None.

    Args:
        hint: Annotation of a field.
    """
    classes = [option for option in alternatives(hint) if is_config(option)]
    kinds = [catalog.kind_of(cls) for cls in classes]
    if len(kinds) == 1 and kinds[0] is not None:
        return catalog.Registry(kinds[0])
    members: dict[Any, Any] = {}
    for cls, kind in zip(classes, kinds, strict=True):
        members.update({registry_name(cls): cls} if kind is None else catalog.Registry(kind))
    return members


def registry_name(cls: Any) -> str | None:
    """Return the key of a config class in its registry, None if it has no `name`."""
    if "name" in (field.name for field in dataclasses.fields(cls)):
        return None  # an ordinary field, as in the config of a run
    return getattr(cls, "name", None)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union annotation; any other annotation alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def closest(word: str, candidates: Iterable[str]) -> str:
    """Return `: did you mean X?` for the candidate closest to a mistyped word, or nothing."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else ""


def to_json(config: Any) -> dict[str, Any]:
    """Return a config as an object for `json.dumps`; `from_json` is the inverse.

    An integer in a float field becomes a float, so that equal configs give equal JSON.

    Raises:
        ValueError: A field holds a type that configs must not hold (an array, a callable, a dict).
    """
    name = registry_name(type(config))
    tag = {} if name is None else {TAG: name}
    hints = field_types(type(config))
    return tag | {key: _encode(getattr(config, key), hint, key) for key, hint in hints.items()}


def from_json(cls: type[Config], data: Any) -> Config:
    """Return the config of `to_json`.

    Args:
        cls: Class of the config.
        data: Parsed JSON.

    Raises:
        ValueError: A field is unknown, missing or of another type, or the class rejects its value;
            the message has the dotted path of the field and the closest existing name.
    """
    return _decode_config(config_classes(cls), data, "")


@dataclasses.dataclass(frozen=True, slots=True)
class _ChoiceField:
    """A field whose value is a config, one of some words, or a tuple of these."""

    name: str
    classes: tuple[type, ...]
    words: tuple[Any, ...]
    is_tuple: bool

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value, after its name, and what to write; None if nothing."""
        if not self.is_tuple or (value is None and type(None) in self.classes):
            return self._item_fault(value)
        if not isinstance(value, tuple):
            return f"={value!r} must be a tuple: write {self.name}=({value!r},)"
        return next((fault for item in value if (fault := self._item_fault(item))), None)

    def _item_fault(self, value: Any) -> str | None:
        if isinstance(value, self.classes) or value in self.words:
            return None
        configs = [cls for cls in self.classes if is_config(cls)]
        if not configs:
            return f"={value!r} must be {' or '.join(map(repr, self.words))}"
        if isinstance(value, type) and issubclass(value, tuple(configs)):
            return f" is the class {value.__name__}, not a config: write {self._written(value)}"
        kinds = [kind for cls in configs if (kind := catalog.kind_of(cls)) is not None]
        if not kinds:
            texts = [f"a {cls.__name__}, {_import_of(cls)}" for cls in configs]
            return f"={value!r} must be {' or '.join(texts)}"
        names = catalog.names(kinds[0])
        if not isinstance(value, str) or value not in names:
            near = closest(str(value), names) if isinstance(value, str) else ""
            return (
                f"={value!r} must be the config of a {kinds[0]}{near} (there is {', '.join(names)})"
            )
        member = catalog.choice(kinds[0], value)
        return (
            f"={value!r} is a name, and the field takes a config: write {self._written(member)},"
            f" {_import_of(member)}"
        )

    def _written(self, cls: type) -> str:
        return (
            f"{self.name}=({cls.__name__}(),)" if self.is_tuple else f"{self.name}={cls.__name__}()"
        )


def check_choices(section: str, config: Any) -> None:
    """Refuse a name, a class or a number where a field takes a config, and an unknown word.

    Args:
        section: Prefix of the field names in the message; empty for a whole config.
        config: The config that is validated.

    Raises:
        ValueError: Names the field, and what to write and to import.
    """
    for field in _choice_fields(type(config)):
        if (fault := field.fault(getattr(config, field.name))) is not None:
            raise ValueError(f"{section}{'.' if section else ''}{field.name}{fault}")


@functools.cache
def _choice_fields(cls: type) -> tuple[_ChoiceField, ...]:
    """Return the fields of a config class that are choices."""
    fields = []
    for name, hint in field_types(cls).items():
        tuple_hint = _tuple_option(hint)
        options = tuple(option for option in alternatives(hint) if option is not tuple_hint)
        options += typing.get_args(tuple_hint)[:1]
        literals = [option for option in options if typing.get_origin(option) is Literal]
        words = tuple(word for option in literals for word in typing.get_args(option))
        classes = tuple(option for option in options if isinstance(option, type))
        if words or any(map(is_config, classes)):
            classes += (int,) if float in classes else ()
            fields.append(_ChoiceField(name, classes, words, tuple_hint is not None))
    return tuple(fields)


def _import_of(cls: type) -> str:
    return f"from {public_module(cls)} import {cls.__name__}"


def public_module(cls: type) -> str:
    """Return the package from which users import a class, or its module."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        package = sys.modules[".".join(parts[:length])]
        names = getattr(package, "__all__", vars(package))
        if cls.__name__ in names and getattr(package, cls.__name__) is cls:
            return package.__name__
    return cls.__module__


def differences(
    saved: Any, current: Any, free: tuple[str, ...] = (), fixed: tuple[str, ...] = ()
) -> list[str]:
    """Return the differences between two configs, one line per field.

    Args:
        saved: A config or its JSON.
        current: A config or its JSON.
        free: Dotted paths that may differ, with all fields below them.
        fixed: Dotted paths below those that may not differ.

    Returns:
        Lines such as `model.moe.top_k: saved 2, given 4`. If another member of a union was chosen,
        there is one line for the choice and none for its fields.
    """
    pair = [value if isinstance(value, Mapping) else to_json(value) for value in (saved, current)]

    def is_beneath(path: str, prefixes: tuple[str, ...]) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)

    return [
        f"{path}: saved {before}, given {after}"
        for path, before, after in _differing(*pair, path="")
        if is_beneath(path, fixed) or not is_beneath(path, free)
    ]


def varying_fields(configs: Sequence[Any]) -> dict[str, list[str]]:
    """Return the fields in which configs differ.

    Args:
        configs: Configs or their JSON.

    Returns:
        Value in each config as text, by dotted path; "-" where the chosen member of a union does
        not have the field.
    """
    data = [value if isinstance(value, Mapping) else to_json(value) for value in configs]
    rows: dict[str, dict[int, str]] = {}
    for index, fields in enumerate(data[1:], 1):
        for path, before, after in _differing(data[0], fields, path=""):
            rows.setdefault(path, {0: before})[index] = after

    def value(path: str, index: int) -> str:
        parts = path.split(".")
        above = (".".join(parts[:length]) for length in range(1, len(parts)))
        if index not in rows[path] and any(index in rows.get(choice, {}) for choice in above):
            return "-"
        return rows[path].get(index, rows[path][0])

    return {path: [value(path, index) for index in range(len(data))] for path in rows}


def fingerprint(config: Any) -> str:
    """Return the sha256 of a config's canonical JSON (sorted keys, no spaces), in hexadecimal."""
    canonical = json.dumps(to_json(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Return `{field: resolved annotation}` of a config class, in the order of the class."""
    hints = typing.get_type_hints(cls)
    if TAG in hints:
        raise TypeError(f"{cls.__name__}.{TAG}: rename the field, {TAG!r} is the tag of unions")
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _encode(value: Any, hint: Any, path: str) -> Any:
    if type(value) is int and float in alternatives(hint) and int not in alternatives(hint):
        return float(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, tuple):
        items = _item_types(hint, len(value))
        return [
            _encode(item, items[i] if items else Any, f"{path}.{i}") for i, item in enumerate(value)
        ]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(f"{path} holds a {type(value).__name__}, which a config must not: {value!r}")


def _decode(hint: Any, data: Any, path: str) -> Any:
    options = alternatives(hint)
    if isinstance(data, Mapping) and any(map(is_config, options)):
        return _decode_config(config_classes(hint), data, path)
    if isinstance(data, list) and (items := _item_types(hint, len(data))):
        return tuple(
            _decode(item, value, f"{path}.{i}")
            for i, (item, value) in enumerate(zip(items, data, strict=True))
        )
    if isinstance(data, list) and not data and _tuple_option(hint) is not None:
        return ()
    for option in options:
        if option is float and isinstance(data, int | float) and not isinstance(data, bool):
            return _float(data, path)
        if option is type(data):
            return data
        if typing.get_origin(option) is Literal and data in typing.get_args(option):
            return data
    options_text = " or ".join(_spell(option) for option in options)
    raise ValueError(f"{path}={json.dumps(data)} must be {options_text}")


def _float(number: float, path: str) -> float:
    try:
        return float(number)
    except OverflowError as error:  # JSON has integers of any size
        raise ValueError(f"{path} has {len(str(number))} digits, too many for a float") from error


def _decode_config(registry: Mapping[Any, Any], data: Any, path: str) -> Any:
    where = path or "the config"
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be an object, not {json.dumps(data)}")
    tag = data.get(TAG) if None not in registry else None
    if not isinstance(tag, str | None) or tag not in registry:
        names = [name for name in registry if name is not None]
        raise ValueError(
            f"{where} has {TAG} {tag!r}{closest(str(tag), names)} (there is {', '.join(names)})"
        )
    cls = registry[tag]
    hints = field_types(cls)
    prefix = f"{path}." if path else ""
    for key in data:
        if key not in hints and not (key == TAG and tag is not None):
            near = closest(key, hints) or f": it has {', '.join(hints)}"
            raise ValueError(f"{prefix}{key} is not a field of {cls.__name__}{near}")
    missing = [prefix + key for key in hints if key not in data]
    if missing:
        raise ValueError(f"{cls.__name__} misses {', '.join(missing)}")
    values = {key: _decode(hint, data[key], prefix + key) for key, hint in hints.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def _tuple_option(hint: Any) -> Any:
    """Return the tuple among the alternatives of an annotation, or None."""
    return next((o for o in alternatives(hint) if typing.get_origin(o) is tuple), None)


def _item_types(hint: Any, length: int) -> tuple[Any, ...]:
    """Return the annotations of the items of a tuple; empty if it must not have this length."""
    items = typing.get_args(_tuple_option(hint))
    if len(items) == 2 and items[1] is Ellipsis:
        return items[:1] * length
    return items if len(items) == length else ()


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(json.dumps(value) for value in typing.get_args(hint))
    if hint is type(None):
        return "null"
    if (kind := catalog.kind_of(hint)) is not None:
        return f"an object of {TAG} {', '.join(catalog.names(kind))}"
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)


def _differing(saved: Any, current: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the differing leaves of two JSON values: dotted path and both values as text."""
    prefix = f"{path}." if path else ""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        if path and saved.get(TAG) != current.get(TAG):
            yield path, _value(saved), _value(current)
            return
        for key in [*saved, *(key for key in current if key not in saved)]:
            yield from _differing(saved.get(key, _ABSENT), current.get(key, _ABSENT), prefix + key)
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        for index, pair in enumerate(zip(saved, current, strict=True)):
            yield from _differing(*pair, f"{prefix}{index}")
    elif saved != current:
        yield path, _value(saved), _value(current)


_ABSENT = object()


def _value(data: Any) -> str:
    if data is _ABSENT:
        return "nothing"
    if isinstance(data, Mapping) and isinstance(data.get(TAG), str):
        return data[TAG]
    if isinstance(data, list):
        return f"[{', '.join(map(_value, data))}]"
    return json.dumps(data)
