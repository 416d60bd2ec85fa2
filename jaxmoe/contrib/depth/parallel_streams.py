# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes P streams of each sequence that differ by learned keys and values, and merges them.

    attention of stream p    over [k_p, k], [v_p, v]      k_p, v_p [U M H], learned in every layer
    output                   sum_p w_p x_p
    w                        (1 - eps) softmax(silu([x_1 ... x_P] W1) W2) + eps / P

Every query sees the learned keys; they are merged with the others by (out, lse). The streams of a
sequence are neighbouring rows of the batch. `jaxmoe.scaling.stream_law` is the law of the loss.

Source: ParScale, arXiv 2505.10475.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext, require_positive
from jaxmoe.layers.mixers.attention import Attended, Attention, AttentionConfig
from jaxmoe.layers.records import HeadArrays, LayerCache, LayerInputs, Stream, TokenInputs
from jaxmoe.precision import PrecisionPolicy
from pallas_kernels import flash_attention
from pallas_kernels.ring.online_softmax import SoftmaxState, merge
from sharding import axes as ax

_STREAM: Final = (ax.ACT_BATCH, ax.ACT_SEQ, None)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelStreamsConfig(AttentionConfig):
    """Grouped-query attention of several streams of each sequence (ParScale)."""

    name: ClassVar[str] = "parallel_streams"
    has_pages: ClassVar[bool] = False
    can_select_pages: ClassVar[bool] = False
    rearranges_rows: ClassVar[bool] = True

    num_streams: int = 2
    """Streams of a sequence (P)."""
    prefix_length: int = 48
    """Learned keys and values of each stream in each layer (U); 0 makes all streams equal."""
    smoothing: float = 0.01
    """Share of the output that is the plain mean of the streams (eps)."""

    def __post_init__(self):
        AttentionConfig.__post_init__(self)
        require_positive("attention", self, "num_streams")
        if self.prefix_length < 0:
            raise ValueError(f"attention.prefix_length={self.prefix_length} must be 0 or more")
        if not 0.0 <= self.smoothing <= 1.0:
            raise ValueError(f"attention.smoothing={self.smoothing} must be between 0 and 1")

    def cache_bytes_per_token(self, precision: PrecisionPolicy, *, layers: int) -> int:
        """Return the bytes that a cache holds of one token of one sequence, in all streams."""
        one = AttentionConfig.cache_bytes_per_token(self, precision, layers=layers)
        return one * self.num_streams

    @property
    def rows_per_sequence(self) -> int:
        """Number of streams."""
        return self.num_streams

    def enter(
        self,
        stream: Stream,
        tokens: TokenInputs,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        has_cache: bool = False,
    ) -> tuple[Stream, TokenInputs]:
        """Return arrays [B S ...] with each row repeated for every stream; others as they are."""
        del context, has_cache

        def repeat(leaf: Array) -> Array:
            if leaf.ndim < 2:
                return leaf
            axes = (*_STREAM[:2], *(None,) * (leaf.ndim - 2))
            region = execution.placement.region(
                lambda rows, *, batch_axes: jnp.repeat(rows, self.num_streams, axis=0),
                in_axes=(axes,),
                out_axes=axes,
            )
            return region(leaf)

        return jax.tree.map(repeat, (stream, tokens))

    def leave(self, stream: Stream, context: LayerContext, execution: ExecutionConfig) -> Stream:
        """Return the merged streams."""
        merge = MergeStreams(
            self.num_streams, self.smoothing, context.embed_dim, execution, name="merge_streams"
        )
        return dataclasses.replace(stream, x=merge(stream.x))

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool = False,
        name: str | None = None,
    ) -> StreamAttention:
        """Return the module of one layer; see `AttentionConfig.build`."""
        del train
        return StreamAttention(self, context, execution, name=name)


class StreamAttention(Attention):
    """One layer of attention to the tokens and to the learned keys of the stream."""

    config: ParallelStreamsConfig

    def attend(
        self,
        heads: HeadArrays,
        tokens: TokenInputs,
        cache: LayerCache | None,
        layer: LayerInputs | None,
        *,
        keeps_lse: bool = False,
    ) -> Attended:
        """Attend to the tokens, and add what the learned keys of the stream give."""
        config = self.config
        placement = self.execution.placement
        attended = Attention.attend(self, heads, tokens, cache, layer, keeps_lse=True)
        out = attended.out
        logits = attended.logits
        lse = logits["lse"]
        if config.prefix_length:
            prefixes = [
                self._prefix(name).astype(heads.q.dtype) for name in ("prefix_k", "prefix_v")
            ]
            rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
            learned = (None, None, ax.KV_HEADS, None)
            queries = (*rows, ax.ACT_HEADS, None)
            sums = (rows[0], ax.ACT_HEADS, rows[1])
            region = placement.region(
                self._merge_learned,
                in_axes=(queries, queries, sums, learned, learned),
                out_axes=(queries, sums),
            )
            out, lse = region(heads.q, out, lse, *prefixes)
        observed = logits if "top" in logits else {}
        return attended._replace(out=out, logits=observed | {"lse": lse} if keeps_lse else observed)

    def _prefix(self, name: str) -> Float[Array, "P U M H"]:
        config = self.config
        declaration = Declaration(
            shape=(config.num_streams, config.prefix_length, config.num_kv_heads, config.head_dim),
            axes=(ax.CONSTANTS, ax.CONSTANTS, ax.KV_HEADS, ax.HEAD_DIM),
            role="constant",
            matrix=None,
            share=1.0 / config.num_streams,
        )
        return declare(self, name, declaration)

    def _merge_learned(self, q, out, lse, k, v, *, batch_axes) -> tuple[Array, Array]:
        """Return attention to the tokens and the learned keys, on the rows of one device."""
        del batch_axes
        k, v = (jnp.tile(part, (q.shape[0] // part.shape[0], 1, 1, 1)) for part in (k, v))
        scale = self.context.multipliers.attention_scale
        kernel = self.execution.implementations.attention
        options: Any = {"softcap": self.config.softcap, "scale": scale, "implementation": kernel}
        learned = SoftmaxState(*flash_attention(q, k, v, causal=False, **options))
        merged = merge(SoftmaxState(out, lse), learned)
        return merged.out, merged.lse


class MergeStreams(nn.Module):
    """Weighted mean of the streams of each sequence, weighted by a small network."""

    num_streams: int
    smoothing: float
    embed_dim: int
    execution: ExecutionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "R S D"]) -> Float[Array, "B S D"]:
        """Return the mean of the P rows of each sequence, R = B P."""
        width = self.embed_dim
        streams = self.num_streams
        inner = ax.MEMORY_INNER
        first = Declaration(
            shape=(streams, width, width),
            axes=(inner, ax.EMBED, inner),
            role="router",  # logits follow, so it is never quantised
            matrix=((-3, -2), (-1,)),
        )
        second = Declaration(shape=(width, streams), axes=(inner, inner), role="router")
        weights = (declare(self, "first", first), declare(self, "second", second))

        def run(x, first, second, *, batch_axes):
            del batch_axes
            f32 = jnp.float32
            wide = x.reshape(-1, streams, *x.shape[1:]).astype(f32)
            hidden = jnp.einsum("bpsd,pdf->bsf", wide, first, preferred_element_type=f32)
            logits = jnp.einsum("bsf,fp->bps", jax.nn.silu(hidden), second)
            share = jax.nn.softmax(logits, axis=1)
            share += f32(self.smoothing) * (f32(1.0 / streams) - share)
            return jnp.sum(wide * share[..., None], axis=1).astype(x.dtype)

        region = self.execution.placement.region(
            run, in_axes=(_STREAM, (None,) * 3, (None,) * 2), out_axes=_STREAM
        )
        return region(x, *weights)
