# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records and protocols of routing: what a router receives, returns and promises.

A MoE layer's routing has these parts, each replaceable alone:

    router      chooses experts: `Selection`, with the logarithm of a score for each pair
    gate        turns scores into weights (`gates.py`); with them a Selection becomes Assignments
    bias        added to the scores for the choice alone (`biases/`)
    balancer    loss of the summed statistics (`balancers/`)
    capacity    limits the assignments of an expert (`capacity.py`)

A router is a config and four methods (`Router`):

    config.build(num_experts=E, top_k=K, embed_dim=D) -> router
    router.declarations() -> {name: Declaration}          parameters
    router.init(key) -> (params, state)                   one layer; state {} where there is none
    router.route(params, state, inputs, train=, key=) -> RouterOutput
    router.update(state, statistics, step) -> state       per optimiser step, without gradient

Contract of `route`, checked by tests/jaxmoe/routing/test_router_contract.py:

- It is pure. With `train=False` it is deterministic and `key` may be None; with `train=True` a key
  is given, and random numbers are drawn per token (`routers/noise.py`), so that the result does
  not depend on the mesh.
- It runs in f32 on the tokens of one device. A rule that looks at several tokens uses the scopes of
  `scopes.py`, with collectives over `inputs.extent`.
- Padding (`token_mask` False) gets empty slots: expert id E, score -inf. It enters no statistic.
- Scores are logarithms, so that every gate is a softmax or a power of one without underflow. The
  gradient reaches the parameters through scores, `probs` and the statistics.
- `statistics` are sums over tokens: one psum over devices, or a sum over micro-batches, gives those
  of the whole batch. `update` receives them summed over the whole optimiser step.
- A token-major selection has A = T*K slots, and token t owns slots t*K to t*K+K-1.

`Traits` and the attributes of `RouterBase` are all that the rest of the library asks about a
router.

To add a router: see `jaxmoe/routing/__init__.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import typing
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.declarations import Declaration

ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus"]
Arrays = dict[str, Array]
"""Arrays by name: the parameters or the state of one layer, or additive statistics."""
Key = Array | None
"""Key of one layer and step; None where no random numbers are drawn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a router that the rest of the library depends on."""

    is_causal: bool = True
    """In evaluation a token's experts and gates depend on no later token."""
    is_pointwise: bool = True
    """In evaluation they depend on no other token, nor on the token's place in the batch."""
    is_rowwise: bool = True
    """In evaluation they depend on no token of another row, nor on the row's place in the batch."""
    sees_others: bool = False
    """In training they depend on other tokens of a scope, later ones included."""
    has_own_gates: bool = False
    """The scores are the gates: the only gate allowed is `softmax`, which does not change them."""
    has_own_load: bool = False
    """The load is even by construction: capacity and balance losses are refused."""
    evens_load: bool = False
    """In training the choice itself is evened over the tokens: balance losses are refused."""
    is_learned: bool = True
    """The choice or the gates depend on trained parameters."""
    is_token_major: bool = True
    """Tokens choose experts; required by experts without computation."""
    carries_logits: bool = False
    """Reads the logits of the previous MoE layer and returns its own in `RouterOutput.carry`."""
    needs_key: bool = False
    """Draws random numbers in training."""
    mixes_tokens: bool = False
    """Experts read mixtures of all tokens of a sequence: no pairs of token and expert exist, and
    `route` needs whole sequences on one device."""
    can_replay: bool = False
    """Takes `RouterInputs.replayed` in place of its own choice, with scores of its own."""
    has_smooth_load: bool = False
    """Returns the differentiable statistic `smooth_load`, which `load_variation` needs."""
    final_top_k: int | None = None
    """Experts per token at the end of training; None: `MoEConfig.top_k`, as before."""


class RouterBase(abc.ABC):
    """Base class of router configs, with the defaults of what is asked about a router.

    A subclass is a frozen dataclass with `name` and `router`, and `traits` where they are not the
    default.
    """

    __slots__ = ()

    name: ClassVar[str]
    """Name in the registry and on the command line."""
    router: ClassVar[type[Any]]
    """Class of the router: of the config, E, K and D."""
    score_function: ClassVar[ScoreFunction | None] = None
    """The function of x W by which experts are chosen and weighed; None for any other router."""

    @property
    def traits(self) -> Traits:
        """Properties of the router."""
        return Traits()

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> Router:
        """Return the router for these sizes.

        Raises:
            ValueError: K experts cannot be chosen out of E, or not by this router.
        """
        return self.router(self, num_experts, top_k, embed_dim)

    def sized_for(self, *, steps: int, rows_per_expert: float) -> RouterBase:
        """Return the config with what depends on the run adapted to it.

        Args:
            steps: Optimiser steps of the run.
            rows_per_expert: Mean assignments per expert and sequence of a top-k router of the same
                cost.
        """
        del steps, rows_per_expert
        return self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Layout of the given tokens within the batch; read by `scopes.py`."""

    sequence_length: int | None = None
    """Positions of one sequence on this device; None: all given tokens are one sequence."""
    sequence_axes: tuple[str, ...] = ()
    """Mesh axes over which the positions of one sequence are spread."""
    batch_axes: tuple[str, ...] = ()
    """Mesh axes over which the sequences are spread."""


# Records are not type-checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class Selection:
    """Chosen pairs of token and expert."""

    token_ids: Int[Array, " A"]
    """Row of the token."""
    expert_ids: Int[Array, " A"]
    """Expert; E marks an empty slot."""
    scores: Float[Array, " A"]
    """Logarithm of the router's unbiased score of the pair, f32; -inf where empty."""
    top_k: int | None = struct.field(pytree_node=False, default=None)
    """K when token-major (A = T*K, token t owns slots t*K to t*K+K-1), else None."""


@typing.no_type_check
@struct.dataclass
class RouterInputs:
    """Inputs of `route`."""

    x: Float[Array, "T D"]
    """Normed activations: f32 in a layer; a router casts those of other callers to f32."""
    token_mask: Bool[Array, " T"]
    """False for padding, which gets no expert and enters no statistic."""
    segment_ids: Int[Array, " T"]
    """Document of each token."""
    previous_logits: Float[Array, "T E"] | None = None
    """Logits of the previous MoE layer, for routers with `Traits.carries_logits`."""
    context: Arrays = struct.field(default_factory=dict)
    """Further inputs by name: `tokens [T] i32`, vocabulary ids; `index [T] i32`, number of each
    token in the whole batch, the same on every mesh and under accumulation; `layer [] i32`, counted
    over MoE layers; `mask_ratio [T] f32` in masked diffusion; `domain [T] i32` where known."""
    replayed: Int[Array, "T K"] | None = None
    """Experts to take in place of the router's choice, for routers with `Traits.can_replay`: E
    marks an empty slot, and a token with a negative id is free; see `replay.py`."""
    extent: Extent = struct.field(pytree_node=False, default=Extent())
    """Layout of these tokens within the batch."""


@typing.no_type_check
@struct.dataclass
class RouterStatistics:
    """Sums over tokens, additive over devices and micro-batches: one psum gives the global batch.

    Stacked over layers, every field has a leading L.
    """

    num_tokens: Float[Array, "*L"]
    """Tokens that are not padding."""
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
    extra: Arrays = struct.field(default_factory=dict)
    """Further additive statistics by name, for `update`, balancers and detailed telemetry."""

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
    """Result of `route`."""

    selection: Selection
    logits: Float[Array, "T E"]
    """Raw and unbiased, f32."""
    probs: Float[Array, "T E"]
    """Probabilities read by losses; each row sums to 1, f32."""
    statistics: RouterStatistics
    """Sums over the given tokens, this device's only."""
    carry: Float[Array, "T E"] | None = None
    """`previous_logits` of the next MoE layer."""
    slots: Slots | None = None
    """Mixtures that the experts read, if any; `selection.token_ids` then are slots."""


@runtime_checkable
class Router(Protocol):
    """A router with its sizes; see the module for the contract."""

    @property
    def num_experts(self) -> int:
        """E."""
        ...

    @property
    def top_k(self) -> int:
        """K."""
        ...

    def declarations(self) -> dict[str, Declaration]:
        """Return the parameters by name."""
        ...

    def init(self, key: Array) -> tuple[Arrays, Any]:
        """Return parameters and state of one layer."""
        ...

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Choose experts; pure, differentiable through scores, probs and statistics."""
        ...

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Return the state after one optimiser step, from the statistics of its global batch."""
        ...


def sum_statistics(
    logits: Float[Array, "T E"],
    probs: Float[Array, "T E"],
    expert_ids: Int[Array, " A"],
    token_mask: Bool[Array, " T"],
) -> RouterStatistics:
    """Compute the additive statistics of a set of tokens; padding enters none.

    Args:
        logits: Raw logits, f32.
        probs: Probabilities, f32; each row sums to 1.
        expert_ids: Ids in [0, E], E where empty (the slots of padding must be empty already).
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
    """Return whether each expert is among the K of each token.

    Args:
        expert_ids: Ids in [0, E], E where empty.
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
    """Return the selection of K experts per token, with the slots of padding emptied.

    Args:
        expert_ids: Ids in [0, E], E where empty.
        scores: Logarithms of the scores, -inf where empty.
        token_mask: False for padding.
        num_experts: E.
    """
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
