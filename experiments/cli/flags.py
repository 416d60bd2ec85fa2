# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses command lines: a recipe, then any field of its config.

    jaxmoe pretrain [recipe] --model.moe.top_k 4 model.moe.router:sigmoid_topk

The recipe comes first and is optional. A field is `--dotted.field value`, with `_` or `-` in its
name. A member of a union is `dotted.field:NAME` or `--dotted.field NAME`, where NAME is its key in
the registry; its own fields may follow anywhere, and a field that only one member has chooses it
(`--data.path docs/` means `data:files`). A tuple of members is `--dotted.field NAME ...`
(none: the empty tuple), and its items are `--dotted.field.0.coefficient 0.02` from then on.

`choices.py` makes the choices, `help.py` writes the pages of `--help`, and tyro parses the other
flags. Touches no device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import os
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_origin

from experiments.cli.choices import (
    choose,
    field_paths,
    known_spelling,
    nested_configs,
)
from experiments.cli.exit_codes import ExitCode as ExitCode
from experiments.cli.help import help_page, take_help
from experiments.cli.hints import group_as_flag, stray_word, unknown_flag
from experiments.cli.output import open_closed_streams, warn, write
from jaxmoe import catalog
from jaxmoe.configs import alternatives, closest, field_types
from jaxmoe.disk import check_local, is_text
from jaxmoe.errors import printable
from jaxmoe.optim.schedules import ScheduleBase
from jaxmoe.optional import MissingPackageError, require
from jaxmoe.routing.composition import RoutingWarning

Config = TypeVar("Config")

logger = logging.getLogger(__name__)

_SIDES = " \u2502"
_RULE = "-\u2500\u2570\u256f"


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
    arguments = list(argv)
    recipe = default
    if arguments and not arguments[0].startswith("-") and ":" not in arguments[0]:
        recipe = known_spelling(arguments.pop(0), recipes)
        if recipe not in recipes:
            if "/" in recipe or "=" in recipe or os.path.isdir(recipe):
                fail(stray_word(recipe, recipes[default](), prog, recipes))
            fail(
                f"unknown recipe {recipe!r}{closest(recipe, recipes)}\n"
                f"recipes: {', '.join(recipes)}"
            )
    listing = f"Recipes, as the first word (default {default}):\n" + _recipe_lines(recipes)
    with exit_on_bad_configuration():
        config = recipes[recipe]()
    description = f"{description.strip()}\n\n{listing}"
    return recipe, parse_flags(config, arguments, prog, description, recipes=recipes)


def _recipe_lines(recipes: Mapping[str, Callable[[], Any]]) -> str:
    """Return a line for each recipe; those of a file that has many share the line of the file."""
    files: dict[str, list[str]] = {}
    for name, function in recipes.items():
        files.setdefault(getattr(function, "__module__", ""), []).append(name)
    lines = []
    for module, names in files.items():
        if len(names) > _RECIPES_WITH_A_LINE:
            lines += textwrap.wrap(
                ", ".join(names), 78, initial_indent="  ", subsequent_indent="  "
            )
            lines.append(f"        {_first_line(sys.modules[module])}")
        else:
            lines += [f"  {name}  {_first_line(recipes[name])}".rstrip() for name in names]
    return "\n".join(lines)


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence routing advice on configs that are not final yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoutingWarning)
        yield


@without_advice()
def parse_flags(
    config: Config,
    argv: Sequence[str],
    prog: str,
    description: str,
    *,
    recipes: Collection[str] = (),
    first_fields: Sequence[str] = (),
) -> Config:
    """`parse` for one recipe: for the commands that take a finished run and little else.

    Args:
        config: The config whose values are the defaults.
        argv: The arguments, without the program.
        prog: How the program is called.
        description: The first paragraph of `--help`.
        recipes: Names of recipes, for messages.
        first_fields: Dotted names of the fields that `--help` shows first; the commonest of all
            commands, further down, when empty.

    Returns:
        The changed config. Exits as `parse` does.
    """
    open_closed_streams()
    with exit_on_bad_configuration():
        for word in argv:
            if not is_text(word):
                raise ValueError(f"{word} has bytes that are no UTF-8: rename what it names")
        group, arguments = take_help(argv)
        config, flags = choose(config, arguments)
        if group is not None:
            write(help_page(config, group, prog, description, first_fields))
            raise SystemExit(int(ExitCode.DONE))
        tyro = require("tyro")
        _check_words(config, flags, prog, recipes)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as page, _bases_as_groups(tyro):
            config = tyro.cli(
                type(config),
                default=config,
                args=flags,
                prog=prog,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
                use_underscores=True,
            )
    except SystemExit:
        fail(_in_one_line(page.getvalue(), type(config).__name__))
    if notes := page.getvalue().rstrip("\n"):
        warn(notes)
    with exit_on_bad_configuration():
        check_local_paths(config)
    return _fit_warmup(config, flags)


def _bases_as_groups(tyro: Any) -> contextlib.AbstractContextManager[Any]:
    """Tell tyro that the base class of a choice stands for a group of flags.

    tyro reads the fields of the chosen member; without this it takes `Base | None` for a value.
    """
    registry = tyro.constructors.ConstructorRegistry()

    @registry.struct_rule
    def _base_rule(info: Any) -> Any:
        if catalog.kind_of(info.type) is None:
            return None
        return tyro.constructors.StructConstructorSpec(instantiate=info.type, fields=())

    return registry


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
    warn(printable(f"error: {message}", kept="\n"))
    raise SystemExit(int(ExitCode.BAD_CONFIGURATION))


def _in_one_line(page: str, name: str) -> str:
    """Return the message of a framed page of tyro's: the lines from the title to the next rule.

    The frame is of box characters where standard output is UTF-8, of hyphens elsewhere; in hyphens
    another rule follows the title. Fields of the whole config are named without its class, those of
    a group with the name of the group, once.

    Args:
        page: The page.
        name: Class of the config.
    """
    lines = [line.strip(_SIDES) for line in page.splitlines()[1:]]
    is_rule = [bool(line) and not line.strip(_RULE) for line in lines]
    first = 1 if is_rule[:1] == [True] else 0
    message = itertools.takewhile(lambda i: not is_rule[i], range(first, len(lines)))
    text = " ".join((" ".join(lines[i] for i in message) or page).split())
    # A line of the page may begin with the full stop of the sentence before.
    text = re.sub(r" \.(?= |$)", ".", text).removeprefix("Error parsing ").removeprefix(f"{name}: ")
    return re.sub(r"^([\w.]+): (?=\1\.)", "", text)


def _first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


_RECIPES_WITH_A_LINE = 3
"""Largest number of recipes of one file that have a line each in `--help`."""
_STORE = re.compile(r"(gs|s3|az|abfss?|adl|hf|r2|oss)://")
_READS = "data"
"""Section whose paths may be in object stores."""


def check_local_paths(config: Any) -> None:
    """Refuse a config with a path in an object store outside of its data.

    Args:
        config: Config of a command.

    Raises:
        ValueError: Names the field, and how to copy a run to a bucket.
    """
    for field, text in _texts(config):
        for name, word in _words(field, text):
            if _STORE.match(word):
                check_local(name, word)


def _texts(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted path and text of every field that holds one, outside of the data."""
    for field in dataclasses.fields(config):
        path = f"{prefix}{field.name}"
        value = getattr(config, field.name)
        if path == _READS:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str):
                yield path, item
            elif dataclasses.is_dataclass(item):
                yield from _texts(item, f"{path}.")


def _words(field: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield name and value; of a command line, those of each of its flags."""
    if field != "command":
        yield field, text
        return
    flag = ""
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flag = name.removeprefix("--")
            word = value if equals else ""
        if not flag.startswith(f"{_READS}."):
            yield flag or field, word


def _fit_warmup(config: Config, arguments: Sequence[str]) -> Config:
    """Return the config with a warm-up or decay that fits its steps, and note what has changed.

    Args:
        config: The config of a command. Without a schedule and steps it is returned unchanged.
        arguments: The arguments; fields that they name stay as they are.
    """
    schedule = getattr(config, "schedule", None)
    steps = getattr(getattr(config, "training", None), "steps", None)
    if not isinstance(schedule, ScheduleBase) or steps is None:
        return config
    flags = [word[2:].partition("=")[0].replace("-", "_") for word in arguments]
    schedule_fields = {
        name.removeprefix("schedule.") for name in flags if name.startswith("schedule.")
    }
    fitted = schedule.fit(steps, schedule_fields)
    if fitted is schedule:
        return config
    changed = [
        f"schedule.{field.name} {getattr(schedule, field.name):g} ->"
        f" {getattr(fitted, field.name):g}"
        for field in dataclasses.fields(schedule)
        if getattr(schedule, field.name) != getattr(fitted, field.name)
    ]
    warn(f"note: {', '.join(changed)}, to fit training.steps={steps}")
    changes: dict[str, Any] = {"schedule": fitted}
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]


def _check_words(
    config: Any, arguments: Sequence[str], prog: str, recipes: Collection[str] = ()
) -> None:
    """Refuse a flag that names no field, and a word that is no value of a flag.

    Args:
        config: The config, with the choices of the command line.
        arguments: The arguments without choices.
        prog: How the program is called.
        recipes: Names of recipes, which are first words.

    Raises:
        ValueError: A word names no field; the message has the nearest spelling.
    """
    groups = dict(nested_configs(config))
    hints = {
        f"{path}.{key}" if path else key: hint
        for path, value in groups.items()
        for key, hint in field_types(type(value)).items()
    }
    expected = 0  # values that the last flag still takes
    for word in arguments:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            name = flag[2:].replace("-", "_")
            if name in groups:
                raise ValueError(group_as_flag(name, prog))
            # Fields of members that are not chosen are read for a message only.
            if name not in hints and name not in (paths := tuple(field_paths(type(config)))):
                raise ValueError(unknown_flag(flag[2:], paths, prog, recipes))
            expected = 0 if equals else _most_values(hints.get(name))
        elif expected:
            expected -= 1
        else:
            raise ValueError(stray_word(word, config, prog, recipes))


def _most_values(hint: Any) -> int:
    """Return the largest number of values that a flag takes."""
    is_tuple = any(get_origin(option) is tuple for option in alternatives(hint))
    return 1_000_000 if is_tuple else 1
