# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of `--help`.

--help           the command, its recipes, its own and its commonest fields, groups and choices
--help GROUP     the fields of one group, such as model.moe, and the members of a choice; those of
                 a part of the run by its name
--help-all       the fields of all groups

A command whose fields fit on one page has them all under `--help`.

To add a field to the commonest: _COMMON in experiments/cli/help.py
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_origin

from experiments.cli.choices import FieldChoice, find_choices, nested_configs, with_value
from jaxmoe import catalog
from jaxmoe.configs import (
    alternatives,
    closest,
    config_classes,
    field_types,
    is_config,
    registry_name,
)
from jaxmoe.field_docs import field_docs

_COMMON: Final = (
    "run.directory",
    "run.name",
    "data.path",
    "training.steps",
    "training.batch_size",
    "training.sequence_length",
    "optimizer.learning_rate",
    "model.num_layers",
    "model.embed_dim",
)
_MOST_LINES = 115
"""Lines of a page that has all fields."""
_PLACEHOLDERS: Final[Mapping[Any, str]] = {
    int: "INT",
    float: "FLOAT",
    str: "STR",
    bool: "True|False",
    type(None): "None",
    Ellipsis: "...",
}


def take_help(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the group that a command line asks help about, and the other words.

    The group is None without a flag of help, "" for the first page, "all" for all fields.
    """
    for index, word in enumerate(arguments):
        remaining = list(arguments[:index])
        if word in ("--help-all", "--help_all"):
            return "all", [*remaining, *arguments[index + 1 :]]
        if word in ("-h", "--help"):
            following = list(arguments[index + 1 :])
            if following and not following[0].startswith("-") and ":" not in following[0]:
                return following[0].replace("-", "_"), [*remaining, *following[1:]]
            return "", [*remaining, *following]
    return None, list(arguments)


def help_page(
    config: Any, group: str, prog: str, description: str, first_fields: Sequence[str] = ()
) -> str:
    """Return a page of help.

    Args:
        config: The config, with the choices of the command line; its values are the defaults.
        group: Dotted path of a group; "" for the first page, "all" for all fields.
        prog: How the program is called.
        description: Text of the first page, with the recipes.
        first_fields: Dotted names of the fields after the first paragraph of the first page; those
            of `_COMMON`, further down, when empty.

    Raises:
        ValueError: There is no such group.
    """
    nested = dict(nested_configs(_with_group(config, group)))
    groups = {path: value for path, value in nested.items() if _own_fields(value)}
    if group not in ("", "all"):
        members = list(_members(config, group))
        if group not in nested and not members:
            if (item := _item(config, group)) is not None:
                return _group_text(config, group, item)
            near = closest(group, groups)
            raise ValueError(f"there is no group {group}{near}\ngroups: {', '.join(groups)}")
        beneath = [path for path in groups if f"{path}.".startswith(f"{group}.")]
        pages = [_group_text(config, path, groups[path]) for path in beneath]
        return "\n\n".join([*pages, *members, *_choices(config, group)])
    usage = f"usage: {prog} [--dotted.field value ...]"
    start = [usage, inspect.cleandoc(description)]
    if first_fields and group == "":
        summary, _, remaining = inspect.cleandoc(description).partition("\n\n")
        heading = "First flags, with the values that hold:"
        start = [usage, summary, "\n".join([heading, *_common(config, first_fields)]), remaining]
    number = sum(len(_own_fields(value)) for value in groups.values())
    if group == "all" or 2 * number < _MOST_LINES:
        sections = (_group_text(config, *item) for item in groups.items())
        everything = "\n\n".join([*start, *_choices(config), *sections])
        if group == "all" or everything.count("\n") < _MOST_LINES:
            return everything
    lines = [_group_text(config, "", config)] if "" in groups else []
    more = f"{prog} --help GROUP lists those of a group, --help-all all:"
    common = [] if first_fields else [f"Commonest fields; {more}", *_common(config, _COMMON), ""]
    listed = [
        *common,
        f"Groups of fields; {more}" if first_fields else "Groups:",
        *_wrap(f"  {'  '.join(path for path in groups if path)}", "  "),
    ]
    return "\n\n".join([*start, *lines, "\n".join(listed), *_choices(config)])


def _with_group(config: Any, group: str) -> Any:
    """Return the config with the defaults of a group that is off, and has one class."""
    paths = dict(nested_configs(config))
    for choice in find_choices(config):
        if choice.path == group and _is_off(choice, paths):
            (member,) = choice.members.values()
            return with_value(config, group.split("."), member())
    return config


def _is_off(choice: FieldChoice, groups: Container[str]) -> bool:
    """Return whether a choice is of one class and none, so that a flag of the class is enough."""
    return choice.is_optional and len(choice.members) == 1 and choice.path not in groups


def _item(config: Any, group: str) -> Any:
    """Return the member of a tuple that flags beside it add, such as --snapshots.every; or None."""
    above, _, name = group.rpartition(".")
    for choice in find_choices(config):
        if choice.is_tuple and choice.path.rpartition(".")[0] == above and name in choice.members:
            return choice.members[name]()
    return None


_FEW = 4
"""Number of groups up to which those that are off are listed among the choices."""


def _choices(config: Any, group: str = "") -> Iterator[str]:
    """Yield the list of choices within a group, if there are any."""
    choices = [c for c in find_choices(config) if not c.path.rpartition(".")[2].isdigit()]
    choices = [c for c in choices if not group or f"{c.path}.".startswith(f"{group}.")]
    paths = dict(nested_configs(config))
    off = [choice.path for choice in choices if _is_off(choice, paths)]
    off = off if len(off) > _FEW else []
    choices = [choice for choice in choices if choice.path not in off]
    if choices:
        yield "\n".join(
            [
                *_wrap(
                    "Choices, as dotted.field:NAME or --dotted.field NAME (of a tuple:"
                    " --dotted.field NAME ...); a flag that only one NAME has chooses it:",
                    "",
                ),
                *_pack(map(str, choices)),
            ]
        )
    if off:
        heading = "Groups that are off until a flag of theirs is given; GROUP:none leaves them off:"
        yield "\n".join([*_wrap(heading, ""), *_wrap(f"  {'  '.join(off)}", "  ")])


def _pack(texts: Iterable[str]) -> list[str]:
    """Return lines of texts: first those that fill lines, then short ones, several on a line."""
    filled: list[str] = []
    shared: list[str] = []
    for text in texts:
        lines = _wrap(f"  {text}", " " * 8)
        joined = [f"{line}    {text}" for line in shared]
        place = next((i for i, line in enumerate(joined) if len(_wrap(line, "")) == 1), None)
        if len(lines) > 1:
            filled += lines
        elif place is None:
            shared += lines
        else:
            shared[place] = joined[place]
    return filled + shared


def _members(config: Any, group: str) -> Iterator[str]:
    """Yield a line about each member of a choice."""
    for choice in find_choices(config):
        if choice.path == group and isinstance(choice.members, catalog.Registry):
            width = max(map(len, choice.members)) + 4
            lines = [
                line
                for name in choice.members
                for line in _wrap(
                    f"{'  ' + name:<{width}}{catalog.line(choice.members.kind, name)}", " " * width
                )
            ]
            yield "\n".join([f"Members of {group}:", *lines])


def _group_text(config: Any, path: str, value: Any) -> str:
    """Return the heading and the fields of one group."""
    lines = [f"{path}: {_about(config, path, value)}" if path else "Fields of the command:"]
    for flag, hint, default, text in _flags(value, path):
        lines.append(f"  --{flag} {_placeholder(hint)}")
        shown = f"{text} (default: {_spell(default)})".strip()
        lines += _wrap(" " * 8 + shown, " " * 8)
    return "\n".join(lines)


def _common(config: Any, paths: Sequence[str]) -> Iterator[str]:
    """Yield one line for each of some fields, those that a config has."""
    width = max(28, *(len(path) + 2 for path in paths))
    for path in paths:
        cls: Any = type(config)
        value: Any = config
        *parents, key = names = path.split(".")
        for parent, following in zip(parents, names[1:], strict=True):
            value = getattr(value, parent, None)
            cls = _class_with(field_types(cls).get(parent), value, following) if cls else None
        if cls is None or key not in field_types(cls):
            continue
        text = field_docs(cls).get(key, "").partition(". ")[0].rstrip(".")
        # What None stands for is behind the semicolon.
        if paths is _COMMON or getattr(value, key, None) is not None:
            text = text.partition(";")[0]
        default = f" ({_spell(getattr(value, key))})" if hasattr(value, key) else ""
        yield from _wrap(f"  {'--' + path:<{width}} {text}{default}", " " * (width + 3))


def _class_with(hint: Any, value: Any, key: str) -> Any:
    """Return the class of a value, else the first alternative of its annotation with a field."""
    if hasattr(value, key):
        return type(value)
    return next((cls for cls in config_classes(hint).values() if key in field_types(cls)), None)


def _flags(value: Any, path: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield dotted name, annotation, default and text of the fields that are no configs."""
    docs = field_docs(type(value))
    for key, hint in _own_fields(value).items():
        yield f"{path}.{key}" if path else key, hint, getattr(value, key), docs.get(key, "")


def _own_fields(value: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a config that are no configs, by name."""
    fields = {}
    for key, hint in field_types(type(value)).items():
        options = alternatives(hint)
        items = [i for o in options if get_origin(o) is tuple for i in get_args(o)]
        inner = [c for item in items for c in alternatives(item)]
        if not any(map(is_config, (*options, *inner))):
            fields[key] = hint
    return fields


def _about(config: Any, path: str, value: Any) -> str:
    """Return the text of a group: of a chosen member its own, else that of its field."""
    if name := registry_name(type(value)):
        return f"{(inspect.getdoc(type(value)) or '').partition(chr(10))[0]} ({name})"
    *parents, key = path.split(".")
    for parent in parents:
        config = config[int(parent)] if isinstance(config, tuple) else getattr(config, parent)
    return field_docs(type(config)).get(key, "")


def _placeholder(hint: Any) -> str:
    """Return what stands for the value of a flag."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return " ".join(map(_placeholder, get_args(hint)))
    options = alternatives(hint)
    if len(options) > 1:
        return "|".join(map(_placeholder, options))
    return _PLACEHOLDERS.get(hint, "VALUE")


def _spell(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return " ".join(map(str, value)) or "empty" if isinstance(value, tuple) else str(value)


def _wrap(line: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
