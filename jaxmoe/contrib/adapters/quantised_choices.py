# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Once-for-all bits: one fine-tuning for all choices of 2, 3 or 4 bits for each layer.

    y = x W_b + s (x A_b) B_b      W_b: W rounded to b bits, b of the layer; A_b, B_b for each b

A training step draws the sum of the bits of the L layers uniformly from 2 L ... 4 L, then which
layers have them: bits drawn for each layer by itself would have a mean near 3 almost always.
Evaluation, generation and `convert --fold True` use bits with a mean of at most `mean_bits` that
round the weights with the least squared error; `--fold_bits` asks for another mean.

Codes are int8, 0 ... 2^b - 1 from the smallest to the largest value of each output column. They are
made from the frozen W where they are used, so that training holds W once.

Readings: the source adjusts its rates by a schedule that it does not print, and searches by the
loss; here both are as above.

Source: One QuantLLM for ALL, arXiv 2405.20202.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Float, Int

from jaxmoe.adapters.base import Layers
from jaxmoe.adapters.factors import MatrixFactorsConfig, factor_rows, own_row
from jaxmoe.declarations import Declaration
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.view import Tree
from jaxmoe.parameters import ParameterSpec
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

_FEWEST = 2
_MOST = 4
_CHOICES = range(_FEWEST, _MOST + 1)
_MORE = _MOST - _FEWEST  # bits that a layer may have beside the fewest
_STREAM_OF_BITS = 0x62  # separates its draws from those of routers


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantisedChoicesConfig(MatrixFactorsConfig):
    """Weights in 2, 3 or 4 bits by layer, drawn in each step, with a low-rank addition for each."""

    name: ClassVar[str] = "quantised_choices"
    has_view: ClassVar[bool] = True
    late_fields: ClassVar[tuple[str, ...]] = ("mean_bits",)

    alpha: float = 32.0
    """The addition is multiplied with alpha over the inner width of the matrix's own factors."""
    mean_bits: float = 3.0
    """Largest mean of the bits of the adapted layers outside of training, from 2 to 4."""

    def __post_init__(self):
        MatrixFactorsConfig.__post_init__(self)
        check_bits("adapter.mean_bits", self.mean_bits)

    def rows_of(
        self, row: ParameterSpec, is_adapted: tuple[bool, ...], rules: LogicalAxisRules
    ) -> list[ParameterSpec]:
        """Return the rows of the factors of each choice, and of the bits of each layer."""
        if not row.declaration.is_stacked:
            raise ValueError(
                f"adapter.targets.roles={self.targets.roles} has {row.path}, and the parameters of"
                " layers alone are in few bits: leave its role out"
            )
        rank = self.rank_of(row)
        scales = tuple(self.alpha / rank if factor else 0.0 for factor in is_adapted)
        down, up, scale = factor_rows(row, rank, scales, rules)
        bits = Declaration(
            shape=(len(is_adapted),),
            axes=row.declaration.axes[:1],
            role="adapter",
            matrix=None,
            init=(float(_MOST),) * len(is_adapted),
            dtype="int32",
        )
        several = [_for_each_choice(factor, rules) for factor in (down, up)]
        return [*several, scale, own_row(f"{row.path}:bits", bits, scale.hyper, rules)]

    def rewrite(self, params: Tree, shared: Tree, part: str) -> Tree:
        """Return the parameters of a layer in its bits, with the factors of these."""
        del shared, part
        flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
        for path in _targets(flat):
            bits, downs, ups = (flat.pop(f"{path}:{name}") for name in ("bits", "downs", "ups"))
            weight = flat[path]
            is_adapted = flat[f"{path}:scale"] > 0
            flat[path] = jnp.where(is_adapted, _round_to(weight, downs, ups, bits), weight)
            for name, factors in (("down", downs), ("up", ups)):
                factor = jax.lax.dynamic_index_in_dim(factors, bits - _FEWEST, 0, keepdims=False)
                flat[f"{path}:{name}"] = factor
        return traverse_util.unflatten_dict(flat, sep="/")

    def prepare(self, params: Any, layers: Layers, key: Array | None = None) -> Any:
        """Return the parameters with the bits of one training step; see `Adapter.prepare`."""
        if key is None:
            return params
        number = len(self._numbers(layers))
        bits = draw_bits(jax.random.fold_in(key, _STREAM_OF_BITS), number)
        return self._with_bits(params, layers, bits)

    def begin(self, params: Any, layers: Layers, key: Array) -> Any:
        """Return the parameters with the bits of least squared error within `mean_bits`."""
        del key
        numbers = self._numbers(layers)
        errors = jnp.zeros((len(numbers), len(_CHOICES)))
        flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
        for path in _targets(flat):
            arrays = tuple(flat[name] for name in (path, f"{path}:downs", f"{path}:ups"))
            squared_errors = jax.lax.map(lambda layer_arrays: _errors(*layer_arrays), arrays)
            for place, number in enumerate(_layers_of(path, layers)):
                if number in numbers:
                    errors = errors.at[numbers.index(number)].add(squared_errors[place])
        gains = errors[:, :-1] - errors[:, 1:]
        gains = jax.lax.cummin(gains, axis=1)  # a further bit never helps more than the one before
        order = jnp.argsort(jnp.argsort(-gains.reshape(-1)))
        more = int((self.mean_bits - _FEWEST) * len(numbers) + 1e-6)
        return self._with_bits(params, layers, _fill(order, jnp.int32(more)))

    def _numbers(self, layers: Layers) -> list[int]:
        """Return the numbers of the layers that have bits."""
        every = sorted(number for _, stack_numbers in layers for number in stack_numbers)
        return [layer for layer in every if not self.targets.layers or layer in self.targets.layers]

    def _with_bits(self, params: Any, layers: Layers, bits: Int[Array, " n"]) -> Any:
        flat = dict(traverse_util.flatten_dict(params, sep="/"))
        numbers = self._numbers(layers)
        for path in _targets(flat):
            layer_numbers = _layers_of(path, layers)
            places = [numbers.index(layer) if layer in numbers else 0 for layer in layer_numbers]
            flat[f"{path}:bits"] = bits[np.asarray(places)].astype(jnp.int32)
        return traverse_util.unflatten_dict(flat, sep="/")


def draw_bits(key: Array, layers: int) -> Int[Array, " layers"]:
    """Return bits of each layer, of which the sum is uniform."""
    total, places = jax.random.split(key)
    more = jax.random.randint(total, (), 0, _MORE * layers + 1)
    return _fill(jax.random.permutation(places, _MORE * layers), more)


def check_bits(field: str, value: float) -> None:
    """Raise ValueError if a mean of bits is not between the fewest and the most."""
    if not _FEWEST <= value <= _MOST:
        raise ValueError(f"{field}={value} must be from {_FEWEST} to {_MOST}")


def _fill(order: Int[Array, " places"], more: Int[Array, ""]) -> Int[Array, " n"]:
    """Return the bits of layers where the first `more` places have one bit beside the fewest."""
    return _FEWEST + jnp.sum((order < more).reshape(-1, _MORE), axis=1).astype(jnp.int32)


def _round_to(weight: Array, downs: Array, ups: Array, bits: Array) -> Array:
    """Return a matrix [*G *I *O] of a layer rounded to codes of some bits, and back."""
    batch = downs.ndim + ups.ndim - 4 - weight.ndim
    axes = tuple(range(batch, downs.ndim - 2))
    low, high = (end(weight, axis=axes, keepdims=True) for end in (jnp.min, jnp.max))
    levels = jnp.left_shift(jnp.int32(1), bits) - 1
    step = jnp.where(high > low, high - low, 1.0) / levels.astype(weight.dtype)
    codes = jnp.round((weight - low) / step).astype(jnp.int8)
    return codes.astype(weight.dtype) * step + low


def _errors(weight: Array, downs: Array, ups: Array) -> Float[Array, " choices"]:
    rounded = [_round_to(weight, downs, ups, jnp.int32(bits)) for bits in _CHOICES]
    return jnp.stack([jnp.sum((weight - choice).astype(jnp.float32) ** 2) for choice in rounded])


def _for_each_choice(row: ParameterSpec, rules: LogicalAxisRules) -> ParameterSpec:
    """Return the row of factors for all choices, [L choices ...] instead of [L ...]."""
    declaration = row.declaration
    shape = (declaration.shape[0], len(_CHOICES), *declaration.shape[1:])
    axes = (declaration.axes[0], ax.RANK, *declaration.axes[1:])
    several = dataclasses.replace(declaration, shape=shape, axes=axes, share=1 / len(_CHOICES))
    return own_row(f"{row.path}s", several, row.hyper, rules)


def _layers_of(path: str, layers: Layers) -> tuple[int, ...]:
    return next(layer_numbers for stack, layer_numbers in layers if path.startswith(f"{stack}/"))


def _targets(params: dict[str, Any]) -> list[str]:
    """Return the paths of the matrices in few bits, of parameters by path."""
    return [path.removesuffix(":bits") for path in params if path.endswith(":bits")]
