# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The seam between the attention layer and the softmax: `attend`, on sequences that may be cut.

It opens an island: each form works on the tokens and heads of one device, and sends what it needs
along the mesh axes of `ACT_SEQ_INNER`. Which tokens a device holds is the form's `layout`; the
caller has laid them out (`token_order`).

To add a form: a file with its config class (`name`, `layout`) and a function with the signature of
`attend_gathered`, its config into `SequenceParallelConfig` in
`sharding/sequence_parallel/__init__.py`, a line in `_attend`, its sizes in `check_sequences`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.sequence_layout import sequence_order
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.all_gather import (
    AllGatherKVConfig,
    attend_gathered,
    observe_gathered,
)
from sharding.sequence_parallel.local_attention import AttentionRules, HeldTokens, Seen
from sharding.sequence_parallel.none import NoSequenceParallelConfig, attend_whole
from sharding.sequence_parallel.ring import RingConfig, attend_ring
from sharding.sequence_parallel.token_ring import TokenRingConfig, attend_token_ring
from sharding.sequence_parallel.ulysses import UlyssesConfig, attend_exchanged
from sharding.sequence_parallel.usp import UlyssesRingConfig, attend_usp

FixedConfig = (
    NoSequenceParallelConfig
    | AllGatherKVConfig
    | UlyssesConfig
    | UlyssesRingConfig
    | RingConfig
    | TokenRingConfig
)
"""The forms themselves, of which `auto` takes one."""


def sequence_ranks(placement: Placement) -> int:
    """Devices that share the positions of a sequence within a sublayer, on the current mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in placement.mesh_axes(ax.ACT_SEQ_INNER))


def token_order(
    config: FixedConfig, length: int, ranks: int, segment_ids: Int[Array, "B S"] | None = None
) -> Int[np.ndarray, " S"] | Int[Array, "B S"] | None:
    """The token held at each position of a laid out row; None: as they stand.

    Args:
        config: of the form.
        length: of the rows.
        ranks: devices that share one.
        segment_ids: in the order of the tokens; only document_zigzag looks at them, and has an
            order for every row then.

    Raises:
        ValueError: the length does not divide.
    """
    if ranks == 1 or config.layout == "contiguous":
        return None
    if config.layout != "document_zigzag":
        segment_ids = None
    if isinstance(config, UlyssesRingConfig):
        ranks //= config.ulysses
    return sequence_order(length, ranks, config.layout, segment_ids)


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    *,
    placement: Placement,
    config: FixedConfig,
    positions: Int[Array, "B S"] | None,
    segment_ids: Int[Array, "B S"] | None,
    places: Int[Array, "B S"] | None = None,
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Seen]:
    """Self-attention of sequences that are laid out as `config` has it.

    Args:
        q: queries.
        k: keys.
        v: values; where sequences are cut, as wide as the keys.
        placement: where arrays lie.
        config: how the positions of a sequence are spread.
        positions: of the tokens, rising within a segment before they were laid out; None: each
            token's place in its row.
        segment_ids: tokens see only their own segment; None: one segment a row.
        places: of the tokens in their rows, where rows differ in their order.
        rules: of the mask.

    Returns:
        The output; and, if observed, of every query the log-sum-exp `lse` and the largest logit
        `top`, f32, without a gradient.
    """
    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    heads, kv_heads = (*rows, ax.ACT_HEADS, None), (*rows, ax.ACT_KV_HEADS, None)
    if config.layout == "document_zigzag" and places is not None and rules.window is not None:
        positions = places  # its kernels know the order of tokens without them, and no distances
    arrays = {"positions": positions, "segment_ids": segment_ids}
    given = {name: array for name, array in arrays.items() if array is not None}
    seen = ("lse", "top") if rules.is_observed else ()
    axes, length = placement.mesh_axes(ax.ACT_SEQ_INNER), q.shape[1]

    def run(q: Array, k: Array, v: Array, given: dict[str, Array], *, batch_axes: tuple[str, ...]):
        del batch_axes
        tokens = HeldTokens(given.get("positions"), given.get("segment_ids"))
        return _attend(q, k, v, tokens, rules, config=config, axes=axes, length=length)

    island = placement.island(
        run,
        in_axes=(heads, kv_heads, kv_heads, dict.fromkeys(given, rows)),
        out_axes=(heads, dict.fromkeys(seen, (ax.ACT_BATCH, ax.ACT_HEADS, ax.ACT_SEQ_INNER))),
    )
    return island(q, k, v, given)


def _attend(
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    v: Float[Array, "B s M Hv"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    config: FixedConfig,
    axes: tuple[str, ...],
    length: int,
) -> tuple[Float[Array, "B s N Hv"], Seen]:
    """On the tokens and heads of one device."""
    if q.shape[1] == length:
        return attend_whole(q, k, v, tokens, rules)
    match config:
        case NoSequenceParallelConfig():
            raise ValueError(
                f"the mesh cuts sequences of {length} tokens into parts of {q.shape[1]}, and"
                " execution.sequence_parallel is 'none': choose a form, or set mesh.seq to 1"
            )
        case AllGatherKVConfig():
            tokens = _with_positions(tokens, config, q.shape[1], length, axes)
            return attend_gathered(q, k, v, tokens, rules, axes=axes)
        case UlyssesConfig():
            return attend_exchanged(q, k, v, tokens, rules, axes=axes, num_chunks=config.num_chunks)
        case RingConfig() | TokenRingConfig():
            axis = _one_axis(axes, config)
            if isinstance(config, RingConfig):
                out = attend_ring(q, k, v, tokens, rules, axis=axis, config=config)
            else:
                out = attend_token_ring(q, k, v, tokens, rules, axis=axis, config=config)
            tokens = _with_positions(tokens, config, q.shape[1], length, axes)
            return out, observe_gathered(q, k, tokens, rules, axes=axes)
        case UlyssesRingConfig():
            outer, inner = _two_axes(axes, config)
            out = attend_usp(q, k, v, tokens, rules, inner=inner, outer=outer, config=config)
            tokens = _with_positions(tokens, config, q.shape[1], length, axes)
            return out, observe_gathered(q, k, tokens, rules, axes=axes)


def _with_positions(
    tokens: HeldTokens, config: FixedConfig, held: int, length: int, axes: tuple[str, ...]
) -> HeldTokens:
    """The tokens with the places in their rows for positions, where none are given."""
    if tokens.positions is not None:
        return tokens
    ranks = length // held
    order: Any = token_order(config, length, ranks)
    places = np.arange(length, dtype=np.int32) if order is None else order
    own = jnp.asarray(places.reshape(ranks, held))[jax.lax.axis_index(axes)]
    return HeldTokens(own, tokens.segment_ids)


def _one_axis(axes: tuple[str, ...], config: FixedConfig) -> str:
    """The axis of a ring, which a fold may have cut in pieces."""
    sizes = {axis: jax.lax.axis_size(axis) for axis in axes}
    cut = [axis for axis, size in sizes.items() if size > 1]
    if len(cut) > 1:
        raise ValueError(
            f"execution.fold cuts mesh.seq into {' x '.join(f'{a}={sizes[a]}' for a in cut)}, and"
            f" execution.sequence_parallel {config.name!r} needs it in one piece: choose"
            " fold.expert x fold.expert_tensor up to mesh.tensor, or from mesh.tensor x mesh.seq"
            " on; or take all_gather or ulysses"
        )
    return cut[0]


def _two_axes(axes: tuple[str, ...], config: UlyssesRingConfig) -> tuple[str, str]:
    """The axis of the ring and that of the exchange, the faster one."""
    sizes = {axis: jax.lax.axis_size(axis) for axis in axes}
    if len(sizes) != 2 or sizes[axes[1]] != config.ulysses:
        raise ValueError(
            f"execution.sequence_parallel 'usp' needs mesh.seq in two pieces, the faster of"
            f" {config.ulysses} (sequence_parallel.ulysses), and the mesh has"
            f" {' x '.join(f'{a}={n}' for a, n in sizes.items())}: set fold.seq_inner to"
            f" {config.ulysses}, and fold.expert x fold.expert_tensor so that it cuts seq nowhere"
            " else"
        )
    return axes[0], axes[1]
