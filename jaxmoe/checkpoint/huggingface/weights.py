# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the parameters of a model from tensors of `transformers`, by the rules of a family.

    transformers                 jaxmoe
    [out, in]                    [in..., out...]             transposed, then reshaped
    gate [F D], up [F D]         gate_up [D 2 F]             one half each
    in_proj [2 C, D]             x [D C], z [D C]            one behind the other
    q_proj [N 2 H, D]            q [D N H], gate [D N H]     the same for each head
    per layer and expert         stacked: [L E ...]
    a bias per expert            router state: [layers with experts, E]

Input and output dimensions come from each parameter's declaration, so no rule repeats a shape.
Heads are not permuted: RoPE rotates the same halves in both, or the attention config has a field
for the layout.

All names and shapes are compared before any value is read, and all mismatches are one error.
`placing.py` places values while they are read; `export.py` writes tensors by the same rules.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import PartitionSpec

from jaxmoe.checkpoint.huggingface.filling import (
    TensorPiece,
    check_finite,
    fill_parameter,
    tensor_values,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.declarations import Declaration
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.parameters import Hyperparameters, ParameterSpec, ParameterTable
from jaxmoe.scaling.initialize import parameter_table
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

EMBEDDING = "model.embed_tokens.weight"
WTE = "transformer.wte.weight"
"""The embedding in families with blocks of `transformer`."""
LING_EMBEDDING = "model.word_embeddings.weight"
_BACKBONES = ("backbone.embeddings.weight", "model.embeddings.weight")
EMBEDDINGS = (EMBEDDING, WTE, LING_EMBEDDING, *_BACKBONES)
"""Names of the embedding in all families."""
HEAD = "lm_head.weight"
ROUTER_STATE = "router_state"
"""First part of the paths of router state."""
Nonfinite = Literal["refuse", "keep"]
"""What to do with values that are NaN, infinite, or infinite in float32."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SHOWN = 20
_STACKS = {ax.EXPERTS, ax.HEAD_EXPERTS}
_PART = 2**28
"""Bytes of a layer, in float32, above which its experts are read in several parts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Tensors that fill a parameter, or half of one."""

    path: str
    """Path of the parameter from the root or from its block; router state: from `ROUTER_STATE`."""
    keys: tuple[str, ...]
    """Names of the tensor: the one on disk, then alternatives. `{layer}` and `{expert}` are
    numbers; where transformers counts two layers as one, `{pair}` is its number and `{side}` is 0
    or 1; a key without {expert} for a parameter of experts is a tensor of all experts,
    [E, out, in], in which the two halves of gate_up follow one another."""
    half: int | None = None
    """Half of gate_up: 0 is the gate, 1 is up."""
    halves: Literal["in_turn", "alternating"] = "in_turn"
    """Outputs of the two halves in one tensor: one half after the other, or gate and up in turn."""
    fused: tuple[str, ...] = ()
    """Paths from the block of the parameters whose outputs follow one another in the tensor, this
    one among them; the tensor holds only this one when empty."""
    experts: Literal["stacked", "rows"] = "stacked"
    """Tensor of all experts: [E, out, in], or rows of one expert behind those of another,
    [E out, in], with a tensor for each half; with the layout in_out [E in, out]."""
    has_idle_experts: bool = False
    """Whether a tensor of all experts has rows of those without computation, too: they are not
    read, and written as 0."""
    fused_from: int = 0
    """Number in `keys` of the first tensor that `fused` is about; those before it hold this
    parameter alone."""
    counts: Literal["layers", "mixers", "feed_forwards"] = "layers"
    """What {layer} counts: layers, or halves of layers, of which the rule is about one."""
    heads_of: str | None = None
    """Path from the block of a parameter with heads, as many as the tensor has groups of outputs:
    the parameters of `fused` follow one another within each group, and each has an equal share of
    its outputs there. None: they follow one another as wholes."""
    is_further: bool = False
    """Whether it is about modules after the last layer, whose {layer} counts on."""
    layout: Literal["out_in", "in_out", "depthwise", "flat", "row", "head"] = "out_in"
    """Dimensions of the tensor: outputs and inputs, the same in the order of the parameter,
    [out, 1, in] of a convolution of each channel, all of a vector's dimensions in one, [1, n] of a
    vector, or [1, 1, n, 1] of a vector of heads."""


Index = tuple[tuple[int, int], ...]
"""First and last-plus-one place of a part along each dimension."""


class Tensors:
    """Reads the parameters and the router state of a model from tensors, on demand.

    Args:
        model: Model of the parameters.
        rules: Rules of the model's family.
        tensors: Tensors by name: numpy, PyTorch, or anything with shape and dtype that numpy reads.
        axis_rules: Rules from logical axes to mesh axes.
        nonfinite: Whether values that are NaN or infinite are refused or kept.

    Raises:
        CheckpointError: Tensors are missing, unexpected, of another shape or not floating point.
    """

    def __init__(
        self,
        model: ModelConfig,
        rules: Sequence[Rule],
        tensors: Mapping[str, Any],
        *,
        axis_rules: LogicalAxisRules,
        nonfinite: Nonfinite = "refuse",
    ):
        self.table = parameter_table(model, rules=axis_rules)
        self.state_table = state_table(model)
        self._tensors = tensors
        self._nonfinite = nonfinite
        rows = (*self.table, *self.state_table)
        self._pieces = pieces_of(model, rows, rules, tensors)
        shapes = {
            piece.key: piece.shape for row_pieces in self._pieces.values() for piece in row_pieces
        }
        if model.has_tied_embeddings and HEAD in tensors:  # a model in memory names it twice
            (table,) = {name for name in EMBEDDINGS if name in shapes}
            shapes[HEAD] = shapes[table]
        _check(shapes, tensors)
        if HEAD in shapes and model.has_tied_embeddings:
            pair = [tensor_values(tensors[name]) for name in (HEAD, table)]
            if not np.array_equal(*pair, equal_nan=True):
                raise CheckpointError(f"tie_word_embeddings is set, but {HEAD} is not {table}")

    def is_stacked(self, row: ParameterSpec) -> bool:
        """Return whether the first dimension counts layers, which can be read one at a time."""
        pieces = self._pieces[row.path]
        return bool(pieces) and all(piece.target and piece.target[0] != ... for piece in pieces)

    def read(self, row: ParameterSpec, layer: int | None = None) -> np.ndarray:
        """Return the values of a parameter or of router state, f32; each tensor is read once.

        Args:
            row: Row of one of the tables.
            layer: Layer of a stacked parameter, from 0; all layers when None.

        Raises:
            CheckpointError: A value is NaN or infinite, and such values are refused.
        """
        pieces = self._pieces[row.path]
        if layer is None:
            return self._values(row, row.shape, pieces)
        pieces = [
            piece._replace(target=piece.target[1:]) for piece in pieces if piece.target[0] == layer
        ]
        return self._values(row, row.shape[1:], pieces)

    def parts(
        self, row: ParameterSpec, is_needed: Callable[[Index], bool] = lambda part: True
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """Yield a parameter or router state in parts, each with its place.

        A part is a layer, or some experts of a layer with a tensor each, where the parameter has
        them; else the whole.

        Args:
            row: Row of one of the tables.
            is_needed: Returns whether the part at a place is read.

        Raises:
            CheckpointError: A value is NaN or infinite, and such values are refused.
        """
        index = tuple((0, size) for size in row.shape)
        if not self.is_stacked(row):
            if is_needed(index):
                yield index, self._values(row, row.shape, self._pieces[row.path])
            return
        layers: dict[int, list[TensorPiece]] = {}
        for piece in self._pieces[row.path]:
            layers.setdefault(piece.target[0], []).append(piece)
        for layer, pieces in layers.items():
            for first, last in _expert_spans(row, pieces):
                place = ((layer, layer + 1), *index[1:])
                shape = row.shape[1:]
                inside = [piece._replace(target=piece.target[1:]) for piece in pieces]
                if last is not None:
                    place = (place[0], (first, last), *place[2:])
                    shape = (last - first, *shape[1:])
                    inside = [
                        piece._replace(target=(piece.target[0] - first, *piece.target[1:]))
                        for piece in inside
                        if first <= piece.target[0] < last
                    ]
                if is_needed(place):
                    yield place, self._values(row, shape, inside)[None]

    def _values(
        self, row: ParameterSpec, shape: tuple[int, ...], pieces: Sequence[TensorPiece]
    ) -> np.ndarray:
        """Return the values that pieces fill, f32."""
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite
            values = fill_parameter(row.path, shape, pieces, self._tensors)
        if self._nonfinite == "refuse":
            check_finite(values, pieces, self._tensors)
        return values


def _is_number(index: Any) -> bool:
    return type(index) is int


def _expert_spans(
    row: ParameterSpec, pieces: Sequence[TensorPiece]
) -> Iterator[tuple[int, int | None]]:
    """Yield first and last-plus-one expert of the parts of a layer; (0, None) for one part.

    Args:
        row: Row of the parameter.
        pieces: Pieces of the layer.
    """
    size = 4 * math.prod(row.shape[1:])
    numbers = {(piece.key, *filter(_is_number, piece.target[1:2])) for piece in pieces}
    has_tensor_each = len(numbers) == len({piece.key for piece in pieces}) and all(
        len(number) == 2 for number in numbers
    )
    if size <= _PART or not has_tensor_each:
        yield 0, None
        return
    count = max(1, _PART * row.shape[1] // size)
    for first in range(0, row.shape[1], count):
        yield first, min(first + count, row.shape[1])


def state_table(model: ModelConfig) -> ParameterTable:
    """Return a table of the arrays of router state, each [layers with experts, ...]."""
    shapes = jax.eval_shape(lambda: initial_router_state(model))
    rows = []
    for path, leaf in sorted(traverse_util.flatten_dict(shapes, sep="/").items()):
        axes = (ax.LAYERS, *(ax.ROUTER_OUT,) * (len(leaf.shape) - 1))
        declaration = Declaration(
            shape=leaf.shape, axes=axes, role="router", matrix=None, init="zeros"
        )
        spec = PartitionSpec()
        path = f"{ROUTER_STATE}/{path}"
        rows.append(
            ParameterSpec(path=path, declaration=declaration, hyper=Hyperparameters(), spec=spec)
        )
    return ParameterTable(tuple(rows))


def pieces_of(
    model: ModelConfig, rows: Sequence[ParameterSpec], rules: Sequence[Rule], names: Container[str]
) -> dict[str, list[TensorPiece]]:
    """Return the pieces of stacked parameters and state by path, layer by layer.

    Args:
        model: Model of the parameters.
        rows: Rows of the model's tables.
        rules: Rules of the model's family.
        names: Names of the tensors, which select one of a rule's keys; empty selects the first.
    """
    table = {row.path: row for row in rows}
    return {row.path: list(_pieces(model, row, rules, names, table)) for row in rows}


def _pieces(
    model: ModelConfig,
    row: ParameterSpec,
    rules: Sequence[Rule],
    names: Container[str],
    table: Mapping[str, ParameterSpec],
) -> Iterator[TensorPiece]:
    """Yield the pieces of one row.

    Args:
        model: Model of the parameter.
        row: The row.
        rules: Rules of the model's family.
        names: Names of the tensors.
        table: All rows by their paths.
    """
    path = row.path
    layers = None
    block = ""
    stacks = (*model.stacks, *model.module_stacks)
    if path.startswith(f"{ROUTER_STATE}/"):
        layers = sorted(i for stack in stacks if stack.moe_layers for i in stack.layers)
    for stack in stacks:
        if path.startswith(f"{stack.path}/"):
            block = f"{stack.path}/"
            path = path.removeprefix(block)
            layers = stack.layers
    for rule in (rule for rule in rules if rule.path == path):
        fused = None
        if rule.fused:
            sizes = [_outputs(table[block + sibling]) for sibling in rule.fused]
            fused = (sum(sizes[: rule.fused.index(path)]), sum(sizes))
        groups = 1 if rule.heads_of is None else _heads(table[block + rule.heads_of])
        if layers is None:
            yield from _of_layer(row, rule, (), _select(rule.keys, names)[1], fused)
            continue
        places = _numbers(model, rule.counts)
        for offset, layer in enumerate(layers):
            if rule.is_further != (layer >= model.num_layers):
                continue
            keys = [_name_of(key, layer, places[layer]) for key in rule.keys]
            number, key = _select(keys, names)
            span = fused if number >= rule.fused_from else None
            idle = model.moe.num_zero_computation if rule.has_idle_experts and model.moe else 0
            for piece in _of_layer(row, rule, (offset,), key, span, idle):
                yield from _by_head(row, piece, groups) if rule.heads_of else (piece,)


def _name_of(key: str, layer: int, place: str) -> str:
    """Return a key of a rule with the numbers of a layer."""
    key = key.replace("{layer}", place).replace("{pair}", str(layer // 2))
    return key.replace("{side}", str(layer % 2))


def _numbers(model: ModelConfig, counts: str) -> Sequence[str]:
    """Return the number in names of each layer, or of each layer's mixer or feed-forward."""
    modules = (stack.kind for stack in model.module_stacks for _ in stack.layers)
    kinds = [*model.kinds, *modules]
    halves = [1 + (kind.feed_forward.name != "none") for kind in kinds]
    sizes = [1] * len(halves) if counts == "layers" else halves
    return list(map(str, itertools.accumulate(sizes, initial=int(counts == "feed_forwards"))))


def _outputs(row: ParameterSpec) -> int:
    """Return the outputs of a matrix, or the size of a vector, of one layer."""
    declaration = row.declaration
    if declaration.matrix is not None:
        return declaration.fan(1)
    return math.prod(row.shape[declaration.is_stacked :])


def _select(keys: Sequence[str], names: Container[str]) -> tuple[int, str]:
    """Return the number and the name of the first key that names have, or else of the first."""
    matches = (
        (number, key) for number, key in enumerate(keys) if key.replace("{expert}", "0") in names
    )
    return next(matches, (0, keys[0]))


def _heads(row: ParameterSpec) -> int:
    """Return the heads of a matrix whose outputs are heads, and features of them."""
    assert row.declaration.matrix is not None
    return row.shape[row.declaration.matrix[1][0]]


def _by_head(row: ParameterSpec, piece: TensorPiece, groups: int) -> Iterator[TensorPiece]:
    """Yield the piece of each group of outputs of a tensor with several parameters.

    Args:
        row: Row of the parameter, a matrix.
        piece: Piece as if the parameters followed one another as wholes.
        groups: Groups of outputs in the tensor.
    """
    assert row.declaration.matrix is not None
    axis = row.declaration.matrix[1][0]  # counts from the end
    size = row.shape[axis] // groups
    outputs = piece.part[0]
    start = outputs.start // groups
    stop = outputs.stop // groups
    step = piece.shape[0] // groups
    for group in range(groups):
        heads = slice(size * group, size * (group + 1))
        target = (*piece.target, ..., heads, *(slice(None),) * (-axis - 1))
        part = (slice(step * group + start, step * group + stop),)
        yield piece._replace(part=part, target=target)


def _of_layer(
    row: ParameterSpec,
    rule: Rule,
    where: tuple[int, ...],
    key: str,
    span: tuple[int, int] | None,
    idle: int = 0,
) -> Iterator[TensorPiece]:
    """Yield the pieces of one layer: one, or one for each expert.

    Args:
        row: Row of the parameter.
        rule: Rule of its tensor.
        where: Index of the layer; () without layers.
        key: The rule's key of the layer.
        span: First output in a tensor of several parameters, and the outputs of all of them.
        idle: Experts without computation that a tensor of all experts has rows of.
    """
    declaration = row.declaration
    halves = 1 if rule.half is None else 2
    fan_in = declaration.fan(0)
    out = _outputs(row) // halves
    inside = () if rule.half is None else (..., rule.half, slice(None))
    is_transposed = rule.layout in ("out_in", "depthwise")
    first, total = span or (0, out)
    cut = (slice(first, first + out),) if span else ()
    if declaration.matrix is None and rule.half is not None:  # biases of gate and up [E, 2 F]
        experts, _, width = row.shape[len(where) :]
        outputs = slice(rule.half, None, 2)
        if rule.halves == "in_turn":
            outputs = slice(rule.half * width, (rule.half + 1) * width)
        target = (*where, slice(None), rule.half)
        yield TensorPiece(key, (experts, 2 * width), (slice(None), outputs), target, False)
    elif declaration.matrix is None and rule.layout == "row":
        yield TensorPiece(key, (1, total), (0,), where, False)
    elif declaration.matrix is None and rule.layout == "head":
        yield TensorPiece(key, (1, 1, total, 1), (0, 0, slice(None), 0), where, False)
    elif declaration.matrix is None:
        is_flat = rule.layout == "flat" or span
        shape = (total,) if is_flat else row.shape[len(where) :]
        yield TensorPiece(key, shape, cut, where, is_transposed and not is_flat)
    elif rule.layout == "depthwise":
        part = (*(cut or (slice(None),)), 0)
        yield TensorPiece(key, (total, 1, fan_in), part, (*where, *inside), is_transposed)
    elif not (stack := _STACKS.intersection(declaration.axes)):
        shape = (total, fan_in) if is_transposed else (fan_in, total)
        yield TensorPiece(key, shape, cut, (*where, *inside), is_transposed)
    else:
        num_experts = row.shape[declaration.axes.index(stack.pop())]
        first = out * (rule.half or 0)
        for expert in range(num_experts):
            name = key.replace("{expert}", str(expert))
            shape = (out, fan_in)
            part = ()
            if rule.experts == "rows":
                rows, columns = shape if is_transposed else shape[::-1]
                shape = (num_experts * rows, columns)
                part = (slice(expert * rows, (expert + 1) * rows),)
            elif "{expert}" not in key:
                outputs = slice(first, first + out)
                if rule.halves == "alternating":
                    outputs = slice(rule.half, None, halves)
                shape = (num_experts + idle, out * halves, fan_in)
                part = (expert, outputs)
                if not is_transposed:
                    shape = (num_experts + idle, fan_in, out * halves)
                    part = (expert, slice(None), outputs)
            yield TensorPiece(name, shape, part, (*where, expert, *inside), is_transposed)


def _check(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    """Raise unless the tensors are exactly those of the model.

    Raises:
        CheckpointError: One line for each tensor that is missing, unexpected or of another shape.
    """
    left_over = [name for name in tensors if name not in shapes]
    missing = [name for name in shapes if name not in tensors]
    lines = []
    for name in missing[:_SHOWN]:
        lines.append(f"{name}: missing, expected {list(shapes[name])}{_near(name, left_over)}")
    for name in left_over[:_SHOWN]:
        shape_in_file = list(tensors[name].shape)
        lines.append(f"{name}: found {shape_in_file}, not in this model{_near(name, missing)}")
    wrong = []
    for name in shapes.keys() - set(missing):
        shape_in_file = tuple(tensors[name].shape)
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        if shape_in_file != shapes[name]:
            wrong.append(f"{name}: found {list(shape_in_file)}, expected {list(shapes[name])}")
        elif dtype not in _FLOATS:
            wrong.append(f"{name}: found {dtype}, expected one of {', '.join(_FLOATS)}")
    lines += sorted(wrong)
    if lines:
        count = len(missing) + len(left_over) + len(wrong)
        shown = "\n  ".join(lines[:_SHOWN]) + ("\n  ..." if count > _SHOWN else "")
        raise CheckpointError(
            f"the tensors are not those of the config ({count} differ):\n  {shown}\n"
            "give the config.json that was saved with them"
        )


def _near(name: str, candidates: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=2, cutoff=0.8)
    return f" (near: {', '.join(near)})" if near else ""
