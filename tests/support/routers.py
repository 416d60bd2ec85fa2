# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Table of router configs for the contract tests, and functions that run one of them.

To add a router: a row in ROUTER_CASES in `tests/support/routers.py`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmoe.routing import (
    BaseLayerConfig,
    BipConfig,
    CosineTopKConfig,
    ExpertChoiceConfig,
    Extent,
    ForcedBalanceConfig,
    GroupLimitConfig,
    GShardConfig,
    HashConfig,
    KMeansConfig,
    LossFreeConfig,
    MoEPlusPlusConfig,
    NoisyTopKConfig,
    ProgressiveTopKConfig,
    QuantileConfig,
    RouterInputs,
    SelectiveSinkhornConfig,
    SigmoidTopKConfig,
    SinkhornConfig,
    SoftmaxTopKConfig,
    SoftMoEConfig,
    SparseMixerConfig,
    SqrtSoftplusTopKConfig,
    UniformRandomConfig,
)

# No two of these are equal: a dimension of size EXPERTS is one of experts.
TOKENS, LENGTH, WIDTH, EXPERTS, VOCAB = 16, 4, 5, 6, 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A router config with K, and the parts of the contract that do not apply to it."""

    config: Any
    top_k: int = 2
    untrained: tuple[str, ...] = ()
    """Parameters that the gates' gradient does not reach, by definition of the method."""
    reads_only_x: bool = False
    """Has no parameters but is differentiable in x."""
    ties_to_first: bool = True
    """Equal tokens have equal scores, and take the lowest experts."""
    is_wide: bool = False
    """In training rows are not routed separately: the scope is wider than a sequence."""
    has_whole_rows: bool = False
    """Needs all positions of a row on one device."""
    is_fast: bool = False
    """In the fast tests although it is not the first of its router; the others are large."""
    asymmetry: str = ""
    """Reason why experts cannot be permuted; empty if they can."""


def each_top_k(config: Any, top_ks: tuple[int, ...] = (1, 2), **peculiar: Any) -> tuple[Case, ...]:
    """Return one case for each K."""
    return tuple(Case(config=config, top_k=top_k, **peculiar) for top_k in top_ks)


GROUPS = GroupLimitConfig(num_groups=3, top_groups=2)

ROUTER_CASES: dict[str, tuple[Case, ...]] = {
    "softmax_topk": (
        *each_top_k(SoftmaxTopKConfig(), (1, 2, EXPERTS)),
        Case(config=SoftmaxTopKConfig(softmax="after"), top_k=1, untrained=("weight",)),
        Case(config=SoftmaxTopKConfig(softmax="after"), is_fast=True),
        Case(config=SoftmaxTopKConfig(bias=LossFreeConfig(rate=0.1))),
        Case(config=SoftmaxTopKConfig(bias=BipConfig(form="batch", start="state")), is_fast=True),
        Case(config=SoftmaxTopKConfig(bias=BipConfig(form="batch", scope="batch")), is_wide=True),
        Case(config=SoftmaxTopKConfig(bias=BipConfig(form="histogram", num_bins=50))),
        Case(config=SoftmaxTopKConfig(bias=BipConfig(form="online", num_bins=50))),
        Case(config=SoftmaxTopKConfig(bias=QuantileConfig(num_bins=50)), is_fast=True),
        # The exact form averages the quantiles of micro-batches.
        Case(config=SoftmaxTopKConfig(bias=QuantileConfig(form="exact")), is_wide=True),
        Case(config=SoftmaxTopKConfig(groups=GROUPS), asymmetry="groups are of consecutive ids"),
        Case(config=SoftmaxTopKConfig(jitter=0.1)),
    ),
    "sigmoid_topk": (
        *each_top_k(SigmoidTopKConfig()),
        Case(
            config=SigmoidTopKConfig(bias=LossFreeConfig(), groups=GROUPS, jitter=0.1),
            is_fast=True,
            asymmetry="groups are of consecutive ids",
        ),
    ),
    "sqrt_softplus_topk": (Case(config=SqrtSoftplusTopKConfig()),),
    "noisy_topk": each_top_k(NoisyTopKConfig(), ties_to_first=False),
    "gshard": (Case(config=GShardConfig()),),
    "sparse_mixer": (Case(config=SparseMixerConfig(margin=0.5)),),
    "cosine_topk": (Case(config=CosineTopKConfig(router_dim=3)),),
    "base_layer": each_top_k(BaseLayerConfig(), ties_to_first=False),
    "sinkhorn": (
        Case(config=SinkhornConfig(), top_k=1),
        Case(config=SinkhornConfig(), is_fast=True),
        Case(config=SinkhornConfig(scope="batch"), is_wide=True),
    ),
    "selective_sinkhorn": (
        *each_top_k(SelectiveSinkhornConfig(probability=1.0)),
        Case(
            config=SelectiveSinkhornConfig(probability=1.0, cost="probs", scope="batch"),
            is_wide=True,
        ),
        Case(config=SelectiveSinkhornConfig(probability=0.0)),
    ),
    **{
        config.name: (Case(config=config, ties_to_first=False, asymmetry="named, not scored"),)
        for config in (HashConfig(), UniformRandomConfig(), ForcedBalanceConfig())
    },
    "kmeans": (Case(config=KMeansConfig(), reads_only_x=True, ties_to_first=False),),
    "expert_choice": (
        *each_top_k(ExpertChoiceConfig(), ties_to_first=False),
        Case(config=ExpertChoiceConfig(weights="probability"), ties_to_first=False),
        Case(
            config=ExpertChoiceConfig(weights="sigmoid", schedule="linear_reverse", k_max=2),
            is_fast=True,
            ties_to_first=False,
        ),
        Case(config=ExpertChoiceConfig(scope="batch"), ties_to_first=False, is_wide=True),
    ),
    "soft_moe": each_top_k(SoftMoEConfig(), (1,), ties_to_first=False, has_whole_rows=True),
    "progressive_topk": (
        Case(config=ProgressiveTopKConfig(), top_k=1),
        Case(config=ProgressiveTopKConfig(early_top_k=(3, 2), switch_step=5), top_k=4),
    ),
    "moe_plus_plus": (Case(config=MoEPlusPlusConfig(), ties_to_first=False),),
}

CASES = [
    pytest.param(
        case,
        id=f"{name}-{index}-top{case.top_k}",
        marks=() if index == 0 or case.is_fast else pytest.mark.large,
    )
    for name, cases in ROUTER_CASES.items()
    for index, case in enumerate(cases)
]
"""The first case of each router is fast, and others that compute something else."""


def with_modes(case: Case) -> tuple[bool, ...]:
    """Return the values of `train` to test: both if training routes differently, else True."""
    traits = case.config.traits
    differs = traits.sees_others or traits.evens_load or traits.needs_key
    return (False, True) if differs else (True,)


MODES = [
    pytest.param(
        *param.values, train, id=f"{param.id}-{'train' if train else 'eval'}", marks=param.marks
    )
    for param in CASES
    for train in with_modes(param.values[0])
]


TRAINING_FAST = [
    mode if mode.values[1] else pytest.param(*mode.values, id=mode.id, marks=pytest.mark.large)
    for mode in MODES
]
"""The modes, of which evaluation is large."""


def build(case: Case) -> Any:
    """Return the router."""
    return case.config.build(num_experts=EXPERTS, top_k=case.top_k, embed_dim=WIDTH)


@functools.cache
def initial(case: Case) -> tuple[dict[str, jax.Array], Any]:
    """Return parameters, perturbed so that none is constant, and state."""
    params, state = build(case).init(jax.random.key(0))
    rng = np.random.default_rng(0)
    moved = {
        name: leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype)
        for name, leaf in sorted(params.items())
    }
    return moved, state


def drawn(seed: int, scale: float = 1.0, tokens: int = TOKENS) -> jax.Array:
    """Return normal activations [tokens WIDTH]."""
    values = np.random.default_rng(seed).normal(size=(tokens, WIDTH)) * scale
    return jnp.asarray(values, jnp.float32)


def given(
    x: jax.Array,
    *,
    mask: Any = None,
    index: Any = None,
    length: int | None = LENGTH,
    extent: Extent | None = None,
    experts: Any = None,
) -> RouterInputs:
    """Return inputs in which vocabulary ids, mask ratios and previous logits depend on the index.

    Args:
        x: Activations.
        mask: False for padding.
        index: Number of each token; arange when None.
        length: Positions of a sequence.
        extent: Extent in place of `length`.
        experts: Order of the experts, for the logits of the previous layer.
    """
    index = jnp.arange(x.shape[0], dtype=jnp.int32) if index is None else index
    frequencies = jnp.arange(1.0, EXPERTS + 1.0)[None, :]
    if experts is not None:
        frequencies = frequencies[:, experts]
    wave = jnp.sin(index[:, None].astype(jnp.float32) * frequencies)
    return RouterInputs(
        x=x,
        token_mask=jnp.ones(x.shape[0], bool) if mask is None else jnp.asarray(mask),
        segment_ids=jnp.ones(x.shape[0], jnp.int32),
        previous_logits=wave,
        context={
            "tokens": 7 * index % VOCAB,
            "index": index,
            "layer": jnp.zeros((), jnp.int32),
            "mask_ratio": ((index // LENGTH) % 4).astype(jnp.float32) / 4.0,
        },
        extent=extent or Extent(sequence_length=length),
    )


@functools.partial(jax.jit, static_argnames=("case", "train", "length", "extent"))
def _run(case, params, state, x, mask, index, experts=None, *, train, length=LENGTH, extent=None):
    inputs = given(x, mask=mask, index=index, length=length, extent=extent, experts=experts)
    key = jax.random.key(3) if train else None
    output = build(case).route(params, state, inputs, train=train, key=key)
    gates = _gates(output.selection)
    return output, _dense(output, gates, x.shape[0]), gates


def routed(
    case: Case,
    x: jax.Array,
    *,
    mask: Any = None,
    keep: Any = None,
    length: int | None = LENGTH,
    train: bool = False,
    values: Any = None,
    experts: Any = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """Return (RouterOutput, weight [T E] of each expert in each token, gates [A]).

    Args:
        case: Row of the table.
        x: Activations.
        mask: False for padding.
        keep: Rows to route without the others, in this order; they keep their index.
        length: Positions of a sequence.
        train: Whether to train, with a key.
        values: (params, state) if not the initial ones.
        experts: Order of the experts; see `given`.
    """
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    mask = jnp.ones(x.shape[0], bool) if mask is None else jnp.asarray(mask)
    if keep is not None:
        x, index, mask = x[keep], index[keep], mask[keep]
    params, state = initial(case) if values is None else values
    return _run(case, params, state, x, mask, index, experts, train=train, length=length)


def on_eight_devices(case: Case, x: jax.Array, mask: Any, *, train: bool) -> Any:
    """Return (dense [T E], summed statistics, updated state) of a run on eight devices."""
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "expert", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    rows, batch_axes = TOKENS // LENGTH, ("data", "expert")
    axes, length = (*batch_axes, "seq"), LENGTH // 2
    if case.has_whole_rows:
        axes, length = batch_axes, LENGTH
    sequence_axes = axes[len(batch_axes) :]
    extent = Extent(sequence_length=length, sequence_axes=sequence_axes, batch_axes=batch_axes)
    spread = PartitionSpec(batch_axes, *sequence_axes)

    def local(params, state, x, mask, index):
        flat = (x.reshape(-1, WIDTH), mask.reshape(-1), index.reshape(-1))
        output, dense, _ = _run(case, params, state, *flat, train=train, extent=extent)
        statistics = jax.tree.map(lambda leaf: jax.lax.psum(leaf, axes), output.statistics)
        state = build(case).update(state, statistics, jnp.int32(0))
        return dense.reshape(*index.shape, EXPERTS), statistics, state

    params, state = initial(case)
    index = jnp.arange(TOKENS, dtype=jnp.int32).reshape(rows, LENGTH)
    whole = PartitionSpec()
    with jax.set_mesh(mesh):
        dense, statistics, state = jax.jit(
            jax.shard_map(
                local,
                in_specs=(whole, whole, spread, spread, spread),
                out_specs=(spread, whole, whole),
            )
        )(
            params,
            state,
            x.reshape(rows, LENGTH, WIDTH),
            jnp.asarray(mask).reshape(rows, LENGTH),
            index,
        )
    return dense.reshape(TOKENS, EXPERTS), statistics, state


def dense_of(output: Any) -> jax.Array:
    """Return the weight [T E] of each expert in each of `TOKENS` tokens."""
    return _dense(output, _gates(output.selection), TOKENS)


def _gates(selection: Any) -> jax.Array:
    """Return the router's scores as gates."""
    return jnp.exp(selection.scores)


def _dense(output: Any, gates: jax.Array, num_tokens: int) -> jax.Array:
    """Return the weight [T E] of each expert in each token, through the slots if there are any."""
    selection, slots = output.selection, output.slots
    is_expert = selection.expert_ids[:, None] == jnp.arange(EXPERTS, dtype=jnp.int32)[None, :]
    weighted = jnp.where(is_expert, gates[:, None], 0.0)
    if slots is None:
        return jax.ops.segment_sum(weighted, selection.token_ids, num_tokens)
    number = slots.combine.shape[0] * slots.combine.shape[2]
    by_slot = jax.ops.segment_sum(weighted, selection.token_ids, number)
    by_slot = by_slot.reshape(slots.combine.shape[0], slots.combine.shape[2], EXPERTS)
    return jnp.einsum("gsp,gpe->gse", slots.combine, by_slot).reshape(num_tokens, EXPERTS)
