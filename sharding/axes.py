# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names of mesh axes (layout of the devices) and logical axes (meaning of a dimension).

No other file spells an axis name.

A folded mesh (`sharding/fold.py`) may have an axis in pieces, the slowest first: `data_0`,
`data_1`.

To add a logical axis: a constant in sharding/axes.py and its name in LOGICAL_AXES there, a row in
DATA_PARALLEL of sharding/rules.py.
"""

from __future__ import annotations

from typing import Final

REPLICA: Final = "replica"  # copies of the whole model, across slices: only gradients travel
STAGE: Final = "stage"  # pipeline stages
DATA: Final = "data"  # sequences, and the shards of fully sharded parameters
EXPERT: Final = "expert"  # routed experts; for dense layers these devices hold sequences too
SEQ: Final = "seq"  # positions of one sequence
TENSOR: Final = "tensor"  # heads and hidden units of one layer

MESH_AXES: Final = (REPLICA, STAGE, DATA, EXPERT, SEQ, TENSOR)
BATCH_AXES: Final = (REPLICA, DATA, EXPERT)  # the axes over which sequences are spread

# Dimensions of parameters.
LAYERS: Final = "layers"  # the layers of the longest stack, which pipelines cut
OTHER_LAYERS: Final = "other_layers"  # the layers of any other stack
EMBED: Final = "embed"  # D, model width
VOCAB: Final = "vocab"  # V
HEADS: Final = "heads"  # N, query heads
KV_HEADS: Final = "kv_heads"  # M, key and value heads
HEAD_DIM: Final = "head_dim"  # H
MLP: Final = "mlp"  # hidden units of a dense feed-forward layer or of the shared experts
GATE_UP: Final = "gate_up"  # the two projections into a SwiGLU
EXPERTS: Final = "experts"  # E
EXPERT_EMBED: Final = "expert_embed"  # D in the weights of the routed experts
EXPERT_MLP: Final = "expert_mlp"  # F, hidden units of one routed expert
ROUTER_OUT: Final = "router_out"  # E as the outputs of the router, which every device needs whole
ROUTER_DIM: Final = "router_dim"  # inner width of a router of two factors
CONSTANTS: Final = "constants"  # the constant experts, which every device has
HEAD_EXPERTS: Final = "head_experts"  # experts of queries and outputs of attention, likewise
ROUTER_SLOTS: Final = "router_slots"  # P, slots of one expert in a sequence
MEMORY_ROWS: Final = "memory_rows"  # the values of a memory
MEMORY_DIM: Final = "memory_dim"  # width of a value of a memory
MEMORY_INNER: Final = "memory_inner"  # heads, keys and inner widths of a memory
NORM: Final = "norm"  # the gains of a norm
TAPS: Final = "taps"  # the taps of a convolution over positions
STATE_GROUPS: Final = "state_groups"  # G, groups of heads that share the inputs of their states
STATE: Final = "state"  # values of a recurrent state per channel
RANK: Final = "rank"  # inner width of an adapter
STREAMS: Final = "streams"  # n, residual streams
CONNECTIONS: Final = "connections"  # numbers with which the residual streams are read and written

# Dimensions of activations.
ACT_BATCH: Final = "act_batch"  # B or T
ACT_SEQ: Final = "act_seq"  # S in the residual stream, between the sublayers
ACT_SEQ_INNER: Final = "act_seq_inner"  # S within a sublayer, beside spread heads or units
ACT_CACHE: Final = "act_cache"  # U, the slots of a cache of keys and values
ACT_EMBED: Final = "act_embed"  # D
ACT_HEADS: Final = "act_heads"  # N
ACT_KV_HEADS: Final = "act_kv_heads"  # M
ACT_MLP: Final = "act_mlp"  # F
ACT_VOCAB: Final = "act_vocab"  # V

ACTIVATION_AXES: Final = (
    ACT_BATCH,
    ACT_SEQ,
    ACT_SEQ_INNER,
    ACT_CACHE,
    ACT_EMBED,
    ACT_HEADS,
    ACT_KV_HEADS,
    ACT_MLP,
    ACT_VOCAB,
)

LOGICAL_AXES: Final = (
    LAYERS,
    OTHER_LAYERS,
    EMBED,
    VOCAB,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    MLP,
    GATE_UP,
    EXPERTS,
    EXPERT_EMBED,
    EXPERT_MLP,
    ROUTER_OUT,
    ROUTER_DIM,
    CONSTANTS,
    HEAD_EXPERTS,
    ROUTER_SLOTS,
    MEMORY_ROWS,
    MEMORY_DIM,
    MEMORY_INNER,
    NORM,
    TAPS,
    STATE_GROUPS,
    STATE,
    RANK,
    STREAMS,
    CONNECTIONS,
    *ACTIVATION_AXES,
)


def whole_axis(name: str) -> str:
    """Return the mesh axis of which this one is a piece, or the name itself."""
    return name.split("_")[0]


def is_our_mesh(axis_names: tuple[str, ...]) -> bool:
    """Return whether a mesh has all six axes in order, whole or in pieces."""
    return tuple(dict.fromkeys(map(whole_axis, axis_names))) == MESH_AXES


def pieces(axis_names: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axis names of a mesh that are one of these axes or a piece of it."""
    return tuple(name for name in axis_names if whole_axis(name) in axes)
