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
import pkgutil
import types
from typing import Any, Final

from jaxmoe.catalog.combinations import ADDRESSES
from jaxmoe.choices import (
    Choice,
    Row,
    above,
    differs,
    equals,
    is_set,
    member,
    that,
    trait,
    values_at,
)
from sharding.state_layouts import STATE_LAYOUTS

_Entry = tuple[str, tuple[str | int, ...], str]


class CombinationError(ValueError):
    """A config makes both choices of a row."""


def check(**fields: Any) -> None:
    """Refuse two choices that do not combine.

    Args:
        **fields: Configs by their names in the config of a run: all of a run, or those at hand, and
            then only the rows between these are checked.

    Raises:
        CombinationError: The config makes both choices of a row.
    """
    _check(types.SimpleNamespace(**fields), frozenset(fields))


def check_between(**fields: Any) -> None:
    """Refuse choices of two configs that do not combine; each has refused its own where it was
    made. What the first one, which is hashable, leaves open is remembered.

    Args:
        **fields: Configs by their names in the config of a run.

    Raises:
        CombinationError: The configs make both choices of a row.
    """
    beside = _rows_beside(*next(iter(fields.items())), frozenset(fields))
    config = types.SimpleNamespace(**fields)
    values = _Values(config)
    for address in dict.fromkeys((*beside.addresses, *_addresses_of(beside.entries, values))):
        for row in beside[address]:
            if row.first.is_made(values) and row.second.is_made(values):
                raise CombinationError(row.refusal(config))


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
    entries = _entries_about(names) if isinstance(config, types.SimpleNamespace) else ADDRESSES
    for address in ("", *_addresses_of(entries, values)):
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


def _addresses_of(entries: tuple[_Entry, ...], values: _Values) -> tuple[str, ...]:
    """Return the addresses that a config names."""
    addresses: dict[str, None] = {}
    for path, members, address in entries:
        for value in values[path]:
            if _is_named(value, members):
                addresses[address] = None
    return tuple(addresses)


@functools.lru_cache(maxsize=256)
def _rows_between(address: str, names: frozenset[str]) -> tuple[Row, ...]:
    """Return the rows at an address, those of the core at the empty one, about some fields."""
    rows = rows_at(address) if address else ROWS
    return tuple(row for row in rows if row.fields <= names)


class _RowsBeside(dict[str, tuple[Row, ...]]):
    """Rows by address about several fields, whose choices of one config are made."""

    def __init__(self, name: str, config: Any, names: frozenset[str]):
        super().__init__()
        self.values_of_config = _Values(types.SimpleNamespace(**{name: config}))
        self.name, self.names = name, names
        self.entries = _entries_about(names - {name})  # lines of ADDRESSES about other fields
        about_config = _entries_about(frozenset((name,)))
        self.addresses = ("", *_addresses_of(about_config, self.values_of_config))

    def __missing__(self, address: str) -> tuple[Row, ...]:
        rows = (row for row in _rows_between(address, self.names) if len(row.fields) > 1)
        self[address] = open_rows = tuple(row for row in rows if self._leaves_open(row))
        return open_rows

    def _leaves_open(self, row: Row) -> bool:
        choices = (choice for choice in (row.first, row.second) if choice.reads == {self.name})
        return all(choice.is_made(self.values_of_config) for choice in choices)


@functools.lru_cache(maxsize=256)
def _rows_beside(name: str, config: Any, names: frozenset[str]) -> _RowsBeside:
    return _RowsBeside(name, config, names)


@functools.cache
def _entries_about(names: frozenset[str]) -> tuple[_Entry, ...]:
    """Return the lines of ADDRESSES about some fields."""
    return tuple(entry for entry in ADDRESSES if entry[0].partition(".")[0] in names)


def _is_named(value: Any, members: tuple[str | int, ...]) -> bool:
    """Whether a value is one of the members or values, or set where there are none."""
    return getattr(value, "name", value) in members if members else bool(value)


REARRANGES_ROWS: Final = that(
    "model.mixers.*",
    "that rearranges rows",
    lambda mixer: mixer.rearranges_rows,
    shown="model.attention",
)
SHARED_HEADS: Final = that(
    "",
    "whose layers share arrays by head",
    lambda config: (
        not all(array.is_by_token for array in config.model.carries(config.execution).values())
    ),
    shown="model.attention",
    needs=("model", "execution"),
)
ONE_STAGE: Final = that(
    "execution.mesh",
    "1",
    lambda mesh: mesh.stage == 1 and -1 not in mesh.sizes,
    shown="execution.mesh.stage",
    needs=("model",),
)
"""A mesh without stages of a model; a search for a mesh leaves a size open."""

GATHERED_BEFORE: Final = tuple(
    name for name, layout in STATE_LAYOUTS.items() if layout.gathered != "layer"
)
"""Layouts that gather parameters before they are used."""

_STAGES: Final = above("execution.mesh.stage", 1)
_LEVELS: Final = equals("data.packing", "levels")
_DETAILED: Final = equals("execution.telemetry", "detailed")
_REORDERED: Final = that(
    "execution",
    "other than contiguous on cut sequences",
    lambda execution: (
        execution.mesh.seq > 1
        and getattr(execution.sequence_parallel, "layout", "contiguous") != "contiguous"
    ),
    shown="execution.sequence_parallel.layout",
)
_REWRITES: Final = trait("model.adapter", "has_view", "with a view")
_CUT_PRODUCTS: Final = trait("execution.tensor_products", "cuts_rows", "that cut rows")
_ONE_STAGE: Final = "set execution.mesh.stage to 1"


def gathered_row(view: Choice) -> Row:
    """Return the row of a view of the parameters, beside layouts that gather them before."""
    return Row(
        view,
        equals("execution.rules", *GATHERED_BEFORE),
        "{first} rewrites parameters where they are used, and {second} gathers them before",
        "set execution.rules to fully_sharded",
    )


def fetched_row(view: Choice) -> Row:
    """Return the row of a view of the parameters, beside a host that holds them."""
    return Row(
        view,
        equals("execution.offload.parameters", "host"),
        "{first} rewrites parameters where they are used, and {second} fetches each layer by"
        " itself",
        "set execution.offload.parameters to device",
    )


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
        _REWRITES,
        "{second} rewrites parameters where they are used, which the stages of {first} do not",
        _ONE_STAGE,
    ),
    Row(
        _STAGES,
        is_set("model.options.has_head_bias"),
        "the stages of {first} share the matrix of the head, and not its biases, {second}",
        f"{_ONE_STAGE}, or leave model.options.has_head_bias out",
    ),
    gathered_row(_REWRITES),
    fetched_row(_REWRITES),
    Row(
        _REWRITES,
        differs("execution.precision.weights", "floating"),
        "{first} rewrites weights, and {second} has them in few bits",
        "set execution.precision.weights to floating, or take adapter:lora",
    ),
    Row(
        _STAGES,
        _DETAILED,
        "{second} compares layers of all stages, and {first} separates them",
        "set execution.telemetry to brief",
    ),
    Row(
        _STAGES,
        that("execution.dispatcher", "with `token_tables`", lambda way: way.traits.token_route),
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
    Row(
        _STAGES,
        SHARED_HEADS,
        "the layers of {second} take arrays of earlier layers, which {first} would pass on between"
        " stages with every micro-batch",
        f"{_ONE_STAGE}, or model.attention to grouped_query",
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
    Row(
        is_set("execution.precision.mixed"),
        differs("execution.precision.weights", "w4ax"),
        "execution.precision.mixed is the format of weights w4ax, which `experiments.checkpoint"
        " convert --quantise w4ax` writes, and changes nothing with {second}",
        "leave execution.precision.mixed out",
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
    Row(
        member("execution.sequence_parallel", "usp", shown="execution.sequence_parallel.ulysses"),
        that(
            "execution",
            "other than execution.sequence_parallel.ulysses",
            lambda execution: (
                execution.sequence_parallel.ulysses
                != (1 if execution.fold is None else execution.fold.seq_inner)
            ),
            shown="execution.fold.seq_inner",
        ),
        "{first} exchanges heads within pieces of mesh.seq, and {second} is their size",
        "set execution.fold.seq_inner to execution.sequence_parallel.ulysses",
    ),
    Row(
        above("execution.mesh.seq", 1),
        REARRANGES_ROWS,
        "{first} cuts sequences into parts, and {second} merges whole rows",
        "set execution.mesh.seq to 1",
    ),
    Row(
        _REORDERED,
        that("model.mixers.*", "recurrent", lambda mixer: mixer.is_recurrent, "model.layers.mixer"),
        "the state of recurrent layers, {second}, runs through a sequence in the order of its"
        " tokens, and {first} is another",
        "set execution.sequence_parallel.layout to contiguous, or execution.mesh.seq to 1",
    ),
    Row(
        _REORDERED,
        that("model.moe", "set", lambda moe: moe.keeps_order, shown="model.moe.capacity"),
        "{second} fills the experts in the order of a sequence's tokens, and {first} is another",
        "set execution.sequence_parallel.layout to contiguous, take ulysses, or set"
        " model.moe.capacity to None",
    ),
    Row(
        that(
            "execution",
            "that spreads experts, on cut sequences",
            lambda execution: (
                max(execution.mesh.seq, execution.mesh.tensor) > 1
                and execution.dispatcher.traits.spreads_experts
            ),
            shown="execution.dispatcher",
        ),
        that("model.moe.router", "that mixes tokens", lambda router: router.traits.mixes_tokens),
        "{second} mixes whole sequences, and with {first} the axes seq and tensor of the mesh cut"
        " them",
        "set execution.dispatcher to local, or execution.mesh.seq and execution.mesh.tensor to 1",
    ),
    # Runs.
    Row(
        equals("model.attention.is_causal", False),
        trait("training.objective", "is_causal", "of next tokens"),
        "{first} lets every position see the token that it should predict next, as {second} does",
        "set training.objective to masked_diffusion, or model.attention.is_causal to True",
    ),
    Row(
        equals("model.attention.is_causal", True),
        trait("training.objective", "is_causal", "that predicts from both sides", value=False),
        "{second} predicts a token from both sides, and {first} hides all that follows it",
        "set model.attention.is_causal to False",
    ),
    Row(
        member("data", "tokenizer_only"),
        trait("data.tokenizer", "is_trained", "that is trained"),
        "{first} has no text, and {second} is trained on text",
        "set data.tokenizer to file",
    ),
    Row(
        member("data", "mixture"),
        is_set("data.partition"),
        "{first} divides its rows by weight, and {second} by content",
        "give all files to one data.path, as data:files, or leave data.partition out",
    ),
    Row(
        equals("data.template", "tokenizer"),
        that(
            "data.tokenizer",
            "without a file",
            lambda tokenizer: tokenizer.file is None,
        ),
        "{first} reads the chat_template beside a tokenizer.json, which {second} has not",
        "set data.tokenizer to file with data.tokenizer.path, or data.template to chatml or plain",
    ),
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
        equals("checkpoint.initial.state", "all"),
        is_set("checkpoint.initial.mapping"),
        "{second} maps parameters, and {first} takes all arrays under their own names",
        "leave out one of them",
    ),
)
"""Rows of the core."""
