# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses command lines: a recipe, then any field of its config.

    python -m experiments.pretrain [recipe] --model.moe.top_k 4 model.moe.router:sigmoid_topk

The recipe comes first and is optional. A field is `--dotted.field value`, with `_` or `-` in its
name. A member of a union is `dotted.field:NAME`, where NAME is its key in
the registry; its own fields may follow anywhere, and a field that only one member has chooses it
(`--data.path docs/` means `data:files`). A tuple of members is `--dotted.field NAME ...`
(none: the empty tuple), and its items are `--dotted.field.0.coefficient 0.02` from then on.

tyro parses; this module adds the names of the registries, recipes, implied members and tuples. It
touches no device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

from experiments.cli.exit_codes import ExitCode as ExitCode
from experiments.cli.output import without_advice
from jaxmoe.configs import alternatives, closest, field_types, registry_name
from jaxmoe.optional import MissingPackageError, require

Config = TypeVar("Config")

logger = logging.getLogger(__name__)

_LONGEST_TUPLE = 16
_CHOICE = re.compile(r"[\w.-]+:[\w-]+")  # not a value such as gs://bucket/x or web=0.7:crawl/


def parse(
    recipes: Mapping[str, Callable[[], Config]],
    default: str,
    argv: Sequence[str],
    prog: str,
    description: str,
) -> tuple[str, Config]:
    """Return the recipe and the config of a command line.

    Args:
        recipes: Functions that return a config, by name; the first line of their docstring is
            shown by `--help`.
        default: The recipe of a command line that names none.
        argv: The arguments, without the program.
        prog: How the program is called, for `--help`.
        description: The first paragraph of `--help`.

    Returns:
        The name of the recipe and the config. Exits with 0 after `--help` and with 2, after one
        screen on stderr, for anything that is not understood.
    """
    words, recipe = list(argv), default
    if words and not words[0].startswith("-") and ":" not in words[0]:
        recipe = _known_spelling(words.pop(0), recipes)
        if recipe not in recipes:
            fail(
                f"unknown recipe {recipe!r}{closest(recipe, recipes)}\n"
                f"recipes: {', '.join(recipes)}"
            )
    lines = [f"  {name}  {_first_line(function)}".rstrip() for name, function in recipes.items()]
    listing = f"Recipes, as the first word (default {default}):\n" + "\n".join(lines)
    with exit_on_bad_configuration():
        config = recipes[recipe]()
    return recipe, parse_flags(config, words, prog, f"{description}\n\n{listing}")


@without_advice()
def parse_flags(config: Config, argv: Sequence[str], prog: str, description: str) -> Config:
    """`parse` for one recipe: for the commands that take a finished run and little else.

    Args:
        config: The config whose values are the defaults.
        argv: The arguments, without the program.
        prog: How the program is called.
        description: The first paragraph of `--help`.

    Returns:
        The changed config. Exits as `parse` does.
    """
    with exit_on_bad_configuration():
        tyro = require("tyro")
    config, words = _choose_tuples(config, list(argv))
    with exit_on_bad_configuration():
        config = _imply_members(config, words)
    words = _last_of_each(_check_flags(config, _check_choices(config, words), prog))
    if listing := _listing(config):
        heading = (
            "Choices, as dotted.field:NAME (of a tuple: --dotted.field NAME ...); a flag that only"
            " one NAME has chooses it:"
        )
        description += f"\n\n{heading}\n{listing}"
    return tyro.cli(
        type(config),
        default=config,
        args=words,
        prog=prog,
        description=description,
        registry=_registry(tyro),
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagConversionOff),
        use_underscores=True,
    )


@contextlib.contextmanager
def exit_on_bad_configuration(
    *errors: type[Exception],
) -> Iterator[None]:
    """Turn errors that the user can correct into one line on stderr and exit code 2.

    Args:
        *errors: Classes of such errors; `ValueError` and `MissingPackageError` when empty. The
            traceback goes to the debug log.
    """
    caught = errors or (ValueError, MissingPackageError)
    try:
        yield
    except caught as error:
        logger.debug("bad configuration", exc_info=True)
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Write `error: message` to stderr and exit with 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(int(ExitCode.BAD_CONFIGURATION))


def _registry(tyro: Any) -> Any:
    """Return tyro's rules, with members of unions under their names in the registry."""
    constructors = tyro.constructors
    registry = constructors.ConstructorRegistry()
    is_inside = False

    def name_members(hint: Any) -> Any:
        members = alternatives(hint)
        if len(members) > 1 and any(map(dataclasses.is_dataclass, members)):
            return Union[tuple(map(name_member, members))]  # noqa: UP007 (built from a tuple)
        if get_origin(hint) is tuple:
            return tuple[tuple(o if o is ... else name_members(o) for o in get_args(hint))]
        return hint

    def name_member(member: Any) -> Any:
        if not dataclasses.is_dataclass(member):
            return member
        return Annotated[member, tyro.conf.subcommand(_member_name(member))]

    @registry.struct_rule
    def rule(info: Any) -> Any:
        nonlocal is_inside
        if is_inside or not dataclasses.is_dataclass(info.type):
            return None
        is_inside = True  # so that the call below finds tyro's own rule
        try:
            spec = constructors.ConstructorRegistry.get_struct_spec(info)
        finally:
            is_inside = False
        if not isinstance(spec, constructors.StructConstructorSpec):
            return spec
        fields = [dataclasses.replace(f, type=name_members(f.type)) for f in spec.fields]
        return dataclasses.replace(spec, fields=tuple(fields))

    return registry


def _member_name(cls: Any) -> str:
    """Return the name in the registry; for a lone class, its own in lower case."""
    return registry_name(cls) or cls.__name__.removesuffix("Config").lower()


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """Field, or item of a tuple, whose value is one of several config classes."""

    path: str
    members: dict[str, Any]
    is_tuple: bool = False
    is_optional: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether there is one member and the field is it; tyro knows no choice then."""
        return len(self.members) == 1 and not self.is_tuple and not self.is_optional


def _choices(config: Any, prefix: str = "") -> Iterator[_Choice]:
    """Yield the choices of a config and of its fields, in the order of `--help`."""
    for key, hint in field_types(type(config)).items():
        value, path = getattr(config, key), prefix + key
        options = alternatives(hint)
        items = next((get_args(o)[0] for o in options if get_origin(o) is tuple), None)
        classes = alternatives(hint if items is None else items)
        members = {_member_name(cls): cls for cls in classes if dataclasses.is_dataclass(cls)}
        is_optional = type(None) in options
        if members and (len(options) > 1 or all(map(registry_name, members.values()))):
            yield _Choice(path, members, items is not None, is_optional)
        for index, item in enumerate(value if items is not None else ()):
            if dataclasses.is_dataclass(item):
                yield _Choice(f"{path}.{index}", members)
                yield from _choices(item, f"{path}.{index}.")
        if dataclasses.is_dataclass(value):
            yield from _choices(value, f"{path}.")


def _choose_tuples(config: Config, words: list[str]) -> tuple[Config, list[str]]:
    """Put the members of `--dotted.tuple NAME ...` into the config; return the other arguments."""
    tuples = {choice.path: choice.members for choice in _choices(config) if choice.is_tuple}
    rest: list[str] = []
    while words:
        path = words[0].removeprefix("--").replace("-", "_")
        if not words[0].startswith("--") or path not in tuples:
            rest.append(words.pop(0))
            continue
        words.pop(0)
        chosen: list[str] = []
        while words and not words[0].startswith("-") and ":" not in words[0]:
            name = _known_spelling(words.pop(0), tuples[path])
            if name not in tuples[path]:
                _fail_choice(f"--{path}", name, tuples[path])
            chosen.append(name)
        config = _with_items(config, path.split("."), [tuples[path][name] for name in chosen])
    return config, rest


def _with_items(config: Any, keys: list[str], classes: list[type]) -> Any:
    """Return a copy in which one tuple holds a member per class; members it had stay."""
    old = functools.reduce(getattr, keys, config)
    new = tuple(next((item for item in old if type(item) is cls), cls()) for cls in classes)
    return _with_value(config, keys, new)


def _imply_members(config: Config, words: list[str]) -> Config:
    """Return a config whose choices have the fields that the arguments name.

    A choice without `dotted.field:NAME` becomes the only member that has all of them; the default
    stays if it does.
    """
    named, chosen = {}, {}  # the first with the spelling of the command line, for messages
    for word in words:
        path, colon, name = word.replace("-", "_").partition(":")
        if word.startswith("--"):
            flag = word.partition("=")[0]
            named[flag[2:].replace("-", "_")] = flag
        elif colon:
            named[path] = word
            chosen[path] = name
    seen: set[str] = set()
    while choice := next((c for c in _choices(config) if c.path not in seen), None):
        seen.add(choice.path)
        keys = choice.path.split(".")
        if choice.is_tuple or any(key.isdigit() for key in keys):
            continue
        fields = {
            name: set(_field_paths(member, f"{choice.path}."))
            for name, member in choice.members.items()
        }
        wanted = {path for path in named if any(path in paths for paths in fields.values())}
        value = functools.reduce(getattr, keys, config)
        current = _member_name(type(value)) if dataclasses.is_dataclass(value) else "none"
        fitting = [name for name, paths in fields.items() if wanted <= paths]
        name = chosen.get(choice.path, current)
        if not wanted <= fields.get(name, set()):
            if choice.path in chosen or len(fitting) != 1:
                _fail_implied(choice.path, chosen.get(choice.path), wanted, fields, named)
            (name,) = fitting
        if name != current and name in choice.members:
            config = _with_value(config, keys, choice.members[name]())
    return config


def _fail_implied(
    path: str,
    chosen: str | None,
    wanted: set[str],
    fields: Mapping[str, set[str]],
    named: Mapping[str, str],
) -> NoReturn:
    """Exit with the member that each argument belongs to, if they do not agree."""
    owners = {
        field: [f"{path}:{name}" for name, paths in fields.items() if field in paths]
        for field in sorted(wanted)
        if chosen is None or field not in fields.get(chosen, set())
    }
    lines = [f"{named[field]} belongs to {' or '.join(names)}" for field, names in owners.items()]
    if chosen is not None:
        lines.append(f"{path}:{chosen} is chosen: leave out one of them")
    elif any(wanted <= paths for paths in fields.values()):
        lines.append("say which")
    else:
        lines.append("choose one")
    fail("; ".join(lines))


def _with_value(config: Any, keys: list[str], value: Any) -> Any:
    """Return a copy with another value at a dotted path."""
    # Not dataclasses.replace: __post_init__ must not check before all flags are read.
    changed = copy.copy(config)
    new = value if len(keys) == 1 else _with_value(getattr(config, keys[0]), keys[1:], value)
    object.__setattr__(changed, keys[0], new)
    return changed


def _check_choices(config: Any, words: list[str]) -> list[str]:
    """Refuse a `dotted.field:NAME` that does not exist and drop one with a single member.

    The others get the spelling of the registry, which tyro needs for a choice inside a choice.
    """
    choices = {choice.path: choice for choice in _choices(config) if not choice.is_tuple}
    rest: list[str] = []
    for word in words:
        path, colon, name = word.replace("-", "_").partition(":")
        choice = choices.get(path) if colon else None
        if choice and name not in (*choice.members, *["none"] * choice.is_optional):
            _fail_choice(f"{path}:", name, choice.members)
        if choice is None:
            rest.append(word)
        elif not choice.is_settled:
            rest.append(f"{path}:{name}")
    return rest


def _check_flags(config: Any, words: list[str], prog: str) -> list[str]:
    """Refuse a flag that names no field; return the arguments unchanged."""
    known = {path.replace("_", "-"): path for path in _field_paths(type(config))}
    for word in words:
        name = word[2:].partition("=")[0]
        if word.startswith("--") and name != "help" and name.replace("_", "-") not in known:
            near = closest(name, known.values())
            fail(f"there is no field --{name}{near}\nsee {prog} --help for all of them")
    return words


def _field_paths(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields, of all members of unions."""
    for key, hint in field_types(cls).items():
        yield prefix + key
        for option in alternatives(hint):
            if get_origin(option) is tuple:
                for member in filter(dataclasses.is_dataclass, alternatives(get_args(option)[0])):
                    for index in range(_LONGEST_TUPLE):
                        yield from _field_paths(member, f"{prefix}{key}.{index}.")
            elif dataclasses.is_dataclass(option):
                yield from _field_paths(option, f"{prefix}{key}.")


def _last_of_each(words: list[str]) -> list[str]:
    """Drop flags that are repeated later: the last one counts."""
    groups: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].replace("_", "-")
            groups.pop(name, None)
        elif _CHOICE.fullmatch(word):
            name = word
        groups.setdefault(name, []).append(word)
    return [word for group in groups.values() for word in group]


def _listing(config: Any) -> str:
    """Return the choices, one per line; tyro lists a nested one only under a chosen parent."""
    lines = [
        f"  {'--' * choice.is_tuple}{choice.path}{' ' if choice.is_tuple else ':'}"
        + " | ".join([*choice.members, *["none"] * choice.is_optional])
        for choice in _choices(config)
        if not choice.path.rpartition(".")[2].isdigit()
    ]
    return "\n".join(lines)


def _fail_choice(where: str, name: str, members: Mapping[str, type]) -> NoReturn:
    fail(f"{where} has no {name!r}{closest(name, members)}\nchoices: {', '.join(members)}")


def _known_spelling(word: str, names: Mapping[str, Any]) -> str:
    """Return the name that a word spells with `_` or `-`; else the word."""
    return {name.replace("_", "-"): name for name in names}.get(word.replace("_", "-"), word)


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
