# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The records and the protocol of routing.

A router is three pure functions: `init`, `route`, `update`. It chooses experts (`Selection`) and
says how much it liked them (`scores`, in the log domain); a gate turns scores into weights; a
balancer turns the summed statistics into a loss or into state; a dispatcher moves rows. None of the
five knows another.

Scores are logarithms, so that every gate is a softmax or a power of one without underflow: the
square root of a softmax probability is `exp(0.5 * log_softmax)`, finite in value and slope.

To add a router: see `jaxmoe/routing/__init__.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.parameters import Declaration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the rest of the library must know of a router; a property of its config."""

    is_causal: bool = True
    """In evaluation a token's experts and gates depend on no later token."""
    sees_others: bool = False
    """In training they depend on the other tokens of a scope, later ones included."""
    has_own_gates: bool = False
    """The scores are the gates: only the gate `softmax`, which takes them as they are, fits."""
    has_own_load: bool = False
    """The load is even by construction: capacity and balance losses are refused."""
    evens_load: bool = False
    """In training the choice itself is evened over the tokens: balance losses are refused."""
    is_learned: bool = True
    """The choice or the gates depend on trained parameters."""
    is_token_major: bool = True
    """Tokens choose experts: experts without computation need it."""
    carries_logits: bool = False
    """Reads the logits of the previous MoE layer and hands its own on."""
    needs_key: bool = False
    """Draws random numbers in training."""
    mixes_tokens: bool = False
    """Experts read mixtures of all tokens of a sequence: no pairs of token and expert exist, and
    `route` needs whole sequences on one device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where the tokens that a router is given stand in the batch; see `scopes.py`."""

    sequence_length: int | None = None
    """Positions of one sequence held here; None: all tokens given are one sequence."""
    sequence_axes: tuple[str, ...] = ()
    """Mesh axes over which the positions of one sequence are spread."""
    batch_axes: tuple[str, ...] = ()
    """Mesh axes over which the sequences are spread."""


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class Selection:
    """Chosen pairs of token and expert."""

    token_ids: Int[Array, " A"]
    """Row of the token."""
    expert_ids: Int[Array, " A"]
    """Expert, or E where the slot is empty."""
    scores: Float[Array, " A"]
    """Logarithm of the router's score of this pair, unbiased, f32; -inf where empty."""
    top_k: int | None = struct.field(pytree_node=False, default=None)
    """K when token-major (A = T*K, token t owns slots t*K to t*K+K-1), else None."""


@typing.no_type_check
@struct.dataclass
class RouterInputs:
    """What a router may look at."""

    x: Float[Array, "T D"]
    """Normed activations; the router casts to f32."""
    token_mask: Bool[Array, " T"]
    """False for padding, which is routed nowhere and counted nowhere."""
    segment_ids: Int[Array, " T"]
    """Document of each token."""
    previous_logits: Float[Array, "T E"] | None = None
    """Logits of the previous MoE layer, for routers that carry them."""
    context: dict[str, Array] = struct.field(default_factory=dict)
    """Anything else, by name: `tokens [T] i32`, their ids in the vocabulary; `index [T] i32`, the
    number of each token in the whole batch, the same on every mesh and under accumulation; `layer
    [] i32`, counted over MoE layers; `mask_ratio [T] f32` in masked diffusion."""
    extent: Extent = struct.field(pytree_node=False, default=Extent())
    """Where these tokens stand in the batch."""


@typing.no_type_check
@struct.dataclass
class RouterStatistics:
    """Sums over tokens, additive over devices and micro-batches: one psum gives the global batch.

    Stacked over layers, every field has a leading L.
    """

    num_tokens: Float[Array, "*L"]
    """Real tokens."""
    counts: Float[Array, "*L E"]
    """Assignments per expert before any drop, no gradient."""
    kept: Float[Array, "*L E"]
    """Assignments per expert that are computed."""
    prob_sum: Float[Array, "*L E"]
    """Sum of the probabilities over all experts; differentiable."""
    z_sum: Float[Array, "*L"]
    """Sum of the squared logsumexp of the logits; differentiable."""
    entropy_sum: Float[Array, "*L"]
    """Sum of the entropy of the probabilities, nats; no gradient."""
    extra: dict[str, Array] = struct.field(default_factory=dict)
    """What a router's `update`, a balancer or detailed telemetry needs beyond, by name; additive
    like the rest."""

    def __add__(self, other: RouterStatistics) -> RouterStatistics:
        return jax.tree.map(jnp.add, self, other)


@typing.no_type_check
@struct.dataclass
class Slots:
    """Mixtures of tokens that experts read in place of tokens, within each sequence."""

    dispatch: Float[Array, "G S P"]
    """Weight of token s in slot p of sequence g."""
    combine: Float[Array, "G S P"]
    """Weight of slot p's output in token s."""


@typing.no_type_check
@struct.dataclass
class RouterOutput:
    """What `route` returns."""

    selection: Selection
    logits: Float[Array, "T E"]
    """Raw and unbiased, f32."""
    probs: Float[Array, "T E"]
    """What losses use: sums to 1 over E, f32."""
    statistics: RouterStatistics
    """Sums over the tokens given, this device's only."""
    carry: Float[Array, "T E"] | None = None
    """What the next MoE layer receives as `previous_logits`."""
    slots: Slots | None = None
    """For routers whose experts read mixtures of tokens: `selection.token_ids` then are slots."""


@runtime_checkable
class Router(Protocol):
    """A router with its sizes filled in."""

    @property
    def num_experts(self) -> int:
        """E."""
        ...

    @property
    def top_k(self) -> int:
        """K."""
        ...

    def declarations(self) -> dict[str, Declaration]:
        """Its parameters by name."""
        ...

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """Parameters and state of one layer."""
        ...

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """Chooses experts; pure, differentiable through scores, probs and statistics."""
        ...

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """New state after one optimiser step, from the statistics of its whole global batch."""
        ...


def sum_statistics(
    logits: Float[Array, "T E"],
    probs: Float[Array, "T E"],
    expert_ids: Int[Array, " A"],
    token_mask: Bool[Array, " T"],
) -> RouterStatistics:
    """The additive statistics of one set of tokens; padding counts nowhere.

    Args:
        logits: f32.
        probs: sums to 1 over E, f32.
        expert_ids: in [0, E], E where empty (padding must be empty already).
        token_mask: False for padding.
    """
    experts = jnp.arange(logits.shape[1], dtype=expert_ids.dtype)
    counts = (expert_ids[:, None] == experts[None, :]).astype(jnp.float32).sum(0)
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    still = jax.lax.stop_gradient(probs)
    entropy = -jnp.sum(jax.scipy.special.xlogy(still, still), axis=-1)
    return RouterStatistics(
        num_tokens=token_mask.sum(dtype=jnp.float32),
        counts=counts,
        kept=counts,
        prob_sum=jnp.sum(probs, axis=0, where=token_mask[:, None]),
        z_sum=jnp.sum(z, where=token_mask),
        entropy_sum=jnp.sum(entropy, where=token_mask),
    )


def chosen_experts(expert_ids: Int[Array, "*T K"], num_experts: int) -> Bool[Array, "*T E"]:
    """Whether each expert is among the K of each token.

    Args:
        expert_ids: E where empty.
        num_experts: E.
    """
    experts = jnp.arange(num_experts, dtype=expert_ids.dtype)
    return (expert_ids[..., None] == experts.reshape((1,) * expert_ids.ndim + (-1,))).any(-2)


def token_major(
    expert_ids: Int[Array, "T K"],
    scores: Float[Array, "T K"],
    token_mask: Bool[Array, " T"],
    num_experts: int,
) -> Selection:
    """A selection of K experts for each token, with the slots of padding emptied."""
    num_tokens, top_k = expert_ids.shape
    is_real = token_mask[:, None]
    ids_TK = jnp.where(is_real, expert_ids, num_experts).astype(jnp.int32)
    scores_TK = jnp.where(is_real, scores, -jnp.inf)
    tokens = jnp.repeat(jnp.arange(num_tokens, dtype=jnp.int32), top_k)
    return Selection(
        token_ids=tokens,
        expert_ids=ids_TK.reshape(-1),  # A = T*K
        scores=scores_TK.reshape(-1),  # A = T*K
        top_k=top_k,
    )
