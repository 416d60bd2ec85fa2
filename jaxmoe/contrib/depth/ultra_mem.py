# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""UltraMemV2: a dense feed-forward and a large table of values, of which a token reads K.

    s, i = choose_entries(q . row keys, q . column keys, C)    queries and keys normed, C [2 2]
    y    = FFN(x) + Wo sum_k s_k (u_{i_k} . P x) v_{i_k}

There are n^2 pairs (u, v). Both terms are initially of one size under the standard parameterisation
(the memory is 1.9 times larger under HyperP): K scores have `expected_norm`, hidden units of a
SwiGLU a mean square of 0.356.

Readings: keys of their own for each rank and one query per side, as in the published code; values
as PEER has them, without activation. The decaying learning rate of the values is left out.

Source: arXiv 2508.18756.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Final

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.contrib.depth.product_keys import choose_entries, expected_norm, score_keys
from jaxmoe.declarations import Declaration, Role, as_factor, declare, declare_matrix
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import (
    FeedForwardSizes,
    LayerContext,
    UnroutedFeedForward,
    require_positive,
)
from jaxmoe.layers.feed_forwards.dense import FeedForward
from jaxmoe.layers.records import FeedForwardOutputs
from sharding import axes as ax
from sharding.products.cut_rows import CutRows
from sharding.products.tensor_parallel import Product

_STREAM: Final = (ax.ACT_BATCH, ax.ACT_SEQ, None)
_HIDDEN_RMS: Final = math.sqrt(0.35578)  # of silu(z), z standard normal
_RANK: Final = 2
_ROWS: Final = ((-1,), (-2,))  # inputs and outputs of a matrix whose rows are looked up


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UltraMemConfig(UnroutedFeedForward):
    """A dense SwiGLU and a memory of looked-up values (UltraMemV2)."""

    name: ClassVar[str] = "ultra_mem"
    module_name: ClassVar[str] = "memory_layer"
    width_fields: ClassVar[tuple[str, ...]] = ("hidden_dim", "value_dim")

    hidden_dim: int = 256
    """Hidden units of the dense feed-forward."""
    num_keys: int = 64
    """Keys of a side (n); the memory has n^2 values."""
    top_k: int = 16
    """Values that a token reads with each head (K), at most num_keys."""
    num_heads: int = 1
    """Heads that read the same values, each with keys of its own."""
    key_dim: int = 64
    """Width of a key."""
    value_dim: int = 64
    """Width of a value, and of the projected input that weighs it."""

    def __post_init__(self):
        names = (field.name for field in dataclasses.fields(self))
        require_positive("ultra_mem", self, *names)
        if self.top_k > self.num_keys:
            raise ValueError(
                f"ultra_mem.top_k={self.top_k} must be at most ultra_mem.num_keys={self.num_keys}"
            )

    @property
    def sizes(self) -> FeedForwardSizes:
        """Sizes that plans read."""
        read = 2 * self.num_heads * self.top_k * self.value_dim
        return FeedForwardSizes(dense_dim=self.hidden_dim, read_dim=read)

    @property
    def declarations(self) -> dict[str, Declaration]:
        """Parameters of the memory that are no products of the stream."""
        inner = (ax.MEMORY_INNER,)
        number = self.num_keys**2
        keys = (2 * self.num_heads, _RANK, self.num_keys, self.key_dim)
        table = Declaration(
            shape=(number, self.value_dim),
            axes=(ax.MEMORY_ROWS, ax.MEMORY_DIM),
            role="memory_value",
            matrix=_ROWS,
            share=min(1.0, self.num_heads * self.top_k / number),
        )
        return {
            "keys": Declaration(shape=keys, axes=inner * 4, role="memory_key", matrix=_ROWS),
            "core": Declaration(
                shape=(_RANK, _RANK), axes=inner * 2, role="state", matrix=None, init="ones"
            ),
            "inputs": table,
            "values": table,
        }

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool,
        name: str | None = None,
    ) -> MemoryLayer:
        """Return the module of one layer."""
        del train
        return MemoryLayer(self, context, execution, name=name)


class MemoryLayer(nn.Module):
    """A dense feed-forward plus a memory."""

    config: UltraMemConfig
    context: LayerContext
    execution: ExecutionConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], routing: Any = None
    ) -> tuple[Float[Array, "B S D"], FeedForwardOutputs]:
        """Compute the layer.

        Args:
            x: Normed input.
            routing: Ignored.
        """
        del routing
        config = self.config
        width = self.context.embed_dim
        placement = self.execution.placement
        queries = config.num_heads * 2 * config.key_dim
        dense = FeedForward(width, config.hidden_dim, self.execution, name="feed_forward")
        y, outputs = dense(x)
        products = {
            "query": self._product("query", width, queries, "mlp_in"),
            "project": self._product("project", width, config.value_dim, "mlp_in"),
            "out": self._product("out", config.value_dim, width, "mlp_out"),
        }
        declared = config.declarations
        params = {name: declare(self, name, declaration) for name, declaration in declared.items()}
        dtype = self.execution.precision.compute_dtype
        params |= {name: params[name].astype(dtype) for name in ("inputs", "values")}
        rows = CutRows.of(placement, ax.MEMORY_ROWS)
        table = dict.fromkeys(("inputs", "values"), (ax.MEMORY_ROWS, None))
        entries = {name: product.entry for name, product in products.items()}
        region = placement.region(
            functools.partial(self._read, products=products, rows=rows),
            in_axes=(_STREAM, entries, {"keys": (None,) * 4, "core": (None,) * 2} | table),
            out_axes=_STREAM,
        )
        weights = {name: product.weight for name, product in products.items()}
        return y + region(x.astype(dtype), weights, params).astype(y.dtype), outputs

    def _product(self, name: str, inputs: int, outputs: int, role: Role) -> Product:
        """Return a product with a matrix that every device has whole."""
        axes = (ax.MEMORY_INNER, ax.EMBED) if name == "out" else (ax.EMBED, ax.MEMORY_INNER)
        declaration = Declaration(shape=(inputs, outputs), axes=axes, role=role)
        execution = self.execution
        return Product(
            "bsd,df->bsf",
            as_factor(declare_matrix(self, name, declaration), execution.precision.compute_dtype),
            (None, None),
            _STREAM,
            activations=execution.precision.activations,
            encoded=execution.encoded_product,
        )

    def _read(self, x, weights, params, *, products, rows: CutRows, batch_axes):
        """Return the memory's output for the tokens of one device."""
        del batch_axes
        config = self.config
        placement = self.execution.placement
        f32 = jnp.float32

        def multiply(name: str, x: Array) -> Array:
            return products[name].of(x, weights[name], placement)

        query = multiply("query", x).reshape(*x.shape[:2], config.num_heads, 2, config.key_dim)
        scores = score_keys(query, params["keys"], self.context.norm_epsilon)
        core = params["core"].astype(f32) / _RANK
        ids, scores = choose_entries(*scores, core, config.top_k)
        flat = (*x.shape[:2], config.num_heads * config.top_k)
        scale = _HIDDEN_RMS * math.sqrt(config.value_dim / config.num_heads)
        scores = scores.reshape(flat) * f32(scale / expected_norm(config.num_keys, config.top_k))
        tokens = (multiply("project", x), ids.reshape(flat), scores)
        return multiply("out", rows.read(*tokens, params["inputs"], params["values"]))
