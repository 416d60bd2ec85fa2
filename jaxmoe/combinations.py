# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What does not combine: one table of pairs of choices, with the reason and the way out.

    Row(equals("execution.halves", 2), above("execution.mesh.stage", 1), reason, way_out)

`check` refuses a config that makes both choices of a row. The configs of whole runs and of servers
call it where they are made; a config that is a part of those, such as `ExecutionConfig`, checks the
rows about itself alone. A choice is a dotted path from the config of the run and a test of the
value there. The words of a row spell each choice with its value as `{first}` and `{second}`.

Rows about members of a vertical are in `jaxmoe/contrib/<vertical>/combinations.py`;
`jaxmoe/catalog/combinations.py` says which choice loads them.

To add a row: a `Row` in ROWS, and its example in `tests/jaxmoe/test_combinations.py`. A rule about
one field belongs to the field, and a size that must divide another to what cuts it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pkgutil
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

from jaxmoe.catalog.combinations import ADDRESSES


class CombinationError(ValueError):
    """A config makes both choices of a row."""


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
        choices = (self.first, self.second)
        names = (choice.needs or (choice.path.partition(".")[0],) for choice in choices)
        return frozenset(itertools.chain.from_iterable(names))


def check(**fields: Any) -> None:
    """Refuse two choices that do not combine.

    Args:
        **fields: Configs by their names in the config of a run: all of a run, or those at hand, and
            then only the rows between these are checked.

    Raises:
        CombinationError: The config makes both choices of a row.
    """
    _check(types.SimpleNamespace(**fields), frozenset(fields))


def check_config(config: Any) -> None:
    """Refuse two choices of the config of a whole run, or of a server, that do not combine.

    Args:
        config: A dataclass.

    Raises:
        CombinationError: The config makes both choices of a row.
    """
    _check(config, frozenset(field.name for field in dataclasses.fields(config)))


def _check(config: Any, names: frozenset[str]) -> None:
    values = _Values(config)
    addresses = dict.fromkeys(
        address
        for path, members, address in ADDRESSES
        if any(_is_named(value, members) for value in values[path])
    )
    for address in ("", *addresses):
        for row in _rows_between(address, names):
            if row.first.is_made(values) and row.second.is_made(values):
                raise CombinationError(row.refusal(config))


class _Values(dict[str, tuple[Any, ...]]):
    """Values of a config by dotted path, each read once: most rows share their paths."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def __missing__(self, path: str) -> tuple[Any, ...]:
        self[path] = values = values_at(self.config, path)
        return values


def all_rows() -> dict[str, tuple[Row, ...]]:
    """Return all rows by vertical, those of the core first, under the empty name."""
    addresses = dict.fromkeys(address for _, _, address in ADDRESSES)
    return {"": ROWS} | {address.split(".")[2]: rows_at(address) for address in addresses}


@functools.cache
def rows_at(address: str) -> tuple[Row, ...]:
    """Return the rows of a vertical, which are imported.

    Args:
        address: `package.module:ROWS`.
    """
    return pkgutil.resolve_name(address)


@functools.lru_cache(maxsize=256)
def _rows_between(address: str, names: frozenset[str]) -> tuple[Row, ...]:
    """Return the rows at an address, those of the core at the empty one, about some fields."""
    rows = rows_at(address) if address else ROWS
    return tuple(row for row in rows if row.fields <= names)


def _is_named(value: Any, members: tuple[str | int, ...]) -> bool:
    """Whether a value is one of the members or values, or set where there are none."""
    return getattr(value, "name", value) in members if members else bool(value)


REARRANGES_ROWS: Final = that(
    "model.mixers.*",
    "that rearranges rows",
    lambda mixer: mixer.rearranges_rows,
    shown="model.attention",
)
ONE_STAGE: Final = that(
    "execution.mesh",
    "1",
    lambda mesh: mesh.stage == 1 and -1 not in mesh.sizes,
    shown="execution.mesh.stage",
    needs=("model",),
)
"""A mesh without stages of a model; a search for a mesh leaves a size open."""

_STAGES: Final = above("execution.mesh.stage", 1)
_LEVELS: Final = equals("data.packing", "levels")
_DETAILED: Final = equals("execution.telemetry", "detailed")
_CUT_PRODUCTS: Final = trait("execution.tensor_products", "cuts_rows", "that cut rows")
_ONE_STAGE: Final = "set execution.mesh.stage to 1"


def _kernel_row(kernel: str, matmul: str) -> Row:
    """Return the row of a kernel that no product in the chosen precision uses."""
    return Row(
        is_set(f"execution.kernels.{kernel}"),
        that(
            "execution.precision.matmul",
            f"without `{kernel}`",
            lambda matmul: kernel not in matmul.kernels,
        ),
        "{first} computes nothing with {second}",
        f"leave it out, or set execution.precision.matmul to {matmul}",
    )


ROWS: Final = (
    # Stages of a pipeline.
    Row(
        above("execution.pipeline.chunks", 1),
        ONE_STAGE,
        "{first} cuts the layers of a stage, and {second} has one",
        "set execution.mesh.stage, or execution.pipeline.chunks to 1",
    ),
    Row(
        _STAGES,
        trait("model.adapter", "has_view", "with a view"),
        "{second} rewrites parameters where they are used, which the stages of {first} do not",
        _ONE_STAGE,
    ),
    Row(
        _STAGES,
        _DETAILED,
        "{second} compares layers of all stages, and {first} separates them",
        "set execution.telemetry to brief",
    ),
    Row(
        _STAGES,
        trait("execution.dispatcher", "token_route", "with `token_tables`"),
        "{second} with token_tables moves tokens from layer to layer, and {first} passes them on"
        " between stages",
        "leave token_tables out",
    ),
    Row(
        _STAGES,
        _LEVELS,
        "{second} computes as many micro-batches as a step needs, and {first} has a schedule of a"
        " fixed number",
        f"{_ONE_STAGE}, or data.packing to best_fit",
    ),
    Row(
        _STAGES,
        above("execution.offload.parts", 1),
        "{second} cuts between layers, which {first} splits over devices",
        "set one of them to 1",
    ),
    Row(
        _STAGES,
        REARRANGES_ROWS,
        "{second} merges its streams behind the last layer, which the stages of {first} do not",
        _ONE_STAGE,
    ),
    # Memory, products and kernels.
    Row(
        _CUT_PRODUCTS,
        that(
            "execution.precision.matmul",
            "in few bits",
            lambda matmul: matmul.build() is not None,
        ),
        "{first} takes products in parts of their rows, and {second} rounds whole rows",
        "set execution.tensor_products to whole, or execution.precision.matmul to full",
    ),
    Row(
        _CUT_PRODUCTS,
        trait(
            "execution.precision",
            "has_floating_weights",
            "in few bits",
            value=False,
            shown="execution.precision.weights",
        ),
        "{first} takes products in parts of their rows, and {second} has scales of whole rows",
        "set execution.tensor_products to whole, or execution.precision.weights to floating",
    ),
    _kernel_row("grouped_swiglu", "full"),
    _kernel_row("quantized_matmul", "halo"),
    _kernel_row("grouped_matmul", "halo"),
    Row(
        is_set("model.has_tied_embeddings"),
        that(
            "parameterization",
            "with the head on a sphere",
            lambda laws: getattr(laws, "tied_embeddings", "") == "refuse",
        ),
        "{first}: {second} keeps the head on a sphere and the embedding off it, and tied they are"
        " one matrix",
        "set model.has_tied_embeddings to False, or parameterization.tied_embeddings to adamw,"
        " which leaves the one matrix to AdamW",
    ),
    Row(
        is_set("model.attention.is_causal"),
        that("model.moe.router", "not causal", lambda router: not router.traits.is_causal),
        "{second} lets later tokens decide about earlier ones, and {first} promises that they do"
        " not",
        "train it by masked diffusion with model.attention.is_causal=False, or take another router",
    ),
    Row(
        trait("model.adapter", "has_after_step", "that changes the state"),
        differs("execution.offload.optimizer"),
        "{first} changes the state after each step, and {second} keeps it elsewhere",
        "set execution.offload to None",
    ),
    # Sequences over devices.
    Row(
        member("execution.sequence_parallel", "none"),
        differs("execution.mesh.seq", 1),
        "{second} needs a sequence-parallel attention, and {first} has whole sequences",
        "set execution.mesh.seq to 1, or execution.sequence_parallel to auto",
    ),
    # Runs.
    Row(
        is_set("training.batch_ramp"),
        _LEVELS,
        "training.batch_ramp changes the rows of a step, and {second} packs them again",
        "leave out training.batch_ramp, or set data.packing to best_fit",
    ),
    Row(
        trait("training.objective", "reads_loss_weights", "that predicts every token", value=False),
        that("data", "with loss weights", lambda data: data.traits.has_loss_weights),
        "{first} predicts every token, and {second} trains on some",
        "choose training.objective:next_token, or data.train_on=all",
    ),
    Row(
        trait("training.objective", "reads_answers", "of answers"),
        unset("rl"),
        "{first} trains on answers and their rewards, and rl is None",
        "train with python -m experiments.rl",
    ),
    Row(
        is_set("rl"),
        trait("training.objective", "reads_answers", "of data", value=False),
        "{second} trains on data, and rl draws answers",
        "set training.objective to policy_gradient",
    ),
    Row(
        is_set("rl"),
        is_set("training.batch_ramp"),
        "every step of rl has rl.prompts x rl.group answers, and training.batch_ramp changes them",
        "set training.batch_ramp to None",
    ),
    Row(
        equals("checkpoint.initial.state", "all"),
        is_set("checkpoint.initial.mapping"),
        "{second} maps parameters, and {first} takes all arrays under their own names",
        "leave out one of them",
    ),
)
"""Rows of the core."""
