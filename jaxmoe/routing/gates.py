# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gates: weights of the chosen experts' outputs, computed from their log scores.

    softmax        g_i = scale exp(s_i)                       the router's score
    renormalized   g_i = scale exp(s_i) / sum_j exp(s_j)      over the K chosen of a token
    sqrt           g_i = sqrt(exp(s_i) / sum_j exp(s_j))      SqrtGate

A gate multiplies the output of its expert, or the input with `scales_input` (Llama 4), which
differs because an expert is not linear.

`scale` is the routed scaling factor, the size of the routed branch relative to the shared one
(DeepSeek-V3: 2.5). DeepSeek's code does not divide where K = 1; `renormalized` always does, so its
gate is then the constant `scale`: for DeepSeek's K = 1 use `softmax` with that scale.

SqrtGate keeps the RMS of the mixture: for uncorrelated expert outputs of RMS r the sum has RMS r *
|g|_2, which is r for sqrt for every K and temperature, and r/sqrt(K) for renormalized gates of a
uniform router. With shared experts both branches are multiplied by 1/sqrt(2) (`mix_shared`). The
gate is computed as exp(0.5 * log_softmax(s)), finite in value and slope where a probability
underflows.

Sources: HyperP (arXiv 2603.28743; ArchScale adds the 1/sqrt(2) for shared experts); for the scale
DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437, section 4.2).

To add a gate: a config in `jaxmoe/routing/gates.py` that extends `GateBase`, its row under
`gate` in `jaxmoe/catalog/layers.py`, its row in `tests/jaxmoe/routing/test_gates.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import Selection
from sharding.assignments import Assignments


class GateBase(abc.ABC):
    """Base class of gate configs."""

    __slots__ = ()

    name: ClassVar[str]
    scales_input: bool = False
    """Whether it multiplies the input of a chosen expert, and not the expert's output."""

    def build(self) -> GateBase:
        """Return the gate: it has no sizes, so the config is the gate."""
        return self

    @abc.abstractmethod
    def __call__(self, selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
        """Compute the gates of a selection.

        Args:
            selection: Chosen pairs.
            scores: Log scores of the pairs, usually `selection.scores`; a separate argument, so
                that a gradient can be taken in them.

        Returns:
            Gates, f32, exactly 0 where the slot is empty.
        """

    def assign(self, selection: Selection) -> Assignments:
        """Return the chosen pairs with their gates.

        Args:
            selection: Chosen pairs.
        """
        return Assignments(
            token_ids=selection.token_ids,
            expert_ids=selection.expert_ids,
            gates=self(selection, selection.scores),
            top_k=selection.top_k,
        )

    def pair_gates(
        self, selection: Selection, scores: Float[Array, " A"], pair_scores: Float[Array, "T E"]
    ) -> Float[Array, "T E"]:
        """Compute the gates of all pairs, on the scale of each token's chosen experts.

        The gate of a chosen pair is that of `__call__`, and the others do not change it.

        Args:
            selection: Chosen pairs, token-major.
            scores: Log scores of the chosen pairs.
            pair_scores: Log scores of all pairs, finite.

        Raises:
            ValueError: The gate has none for pairs that are not chosen.
        """
        del selection, scores, pair_scores
        raise ValueError(
            f"moe.gate={self.name} has gates for the chosen experts of a token alone, and"
            " moe.capacity adds others: take another gate, or leave moe.capacity out"
        )

    def mix_shared(self, routed: Array, shared: Array) -> Array:
        """Combine the outputs of the routed and the shared experts: by default their sum."""
        return routed + shared


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxGateConfig(GateBase):
    """The router's own score."""

    name: ClassVar[str] = "softmax"

    scale: float = 1.0
    """Routed scaling factor: multiplies every gate."""
    scales_input: bool = False
    """Whether the gate multiplies the input of the expert, and not its output (Llama 4)."""

    def __post_init__(self):
        _check_scale(self.scale)

    def __call__(self, selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
        """Return the scores times `scale`."""
        del selection
        return self.scale * jnp.exp(scores)

    def pair_gates(
        self, selection: Selection, scores: Float[Array, " A"], pair_scores: Float[Array, "T E"]
    ) -> Float[Array, "T E"]:
        """Return the scores times `scale`."""
        del selection, scores
        return self.scale * jnp.exp(pair_scores)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RenormalizedGateConfig(GateBase):
    """Scores divided by their sum over the chosen experts of the token."""

    name: ClassVar[str] = "renormalized"

    scale: float = 1.0
    """Routed scaling factor: the sum of a token's gates."""

    def __post_init__(self):
        _check_scale(self.scale)

    def __call__(self, selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
        """Return gates that sum to `scale` per token."""
        return self.scale * jnp.exp(_log_shares(selection, scores))

    def pair_gates(
        self, selection: Selection, scores: Float[Array, " A"], pair_scores: Float[Array, "T E"]
    ) -> Float[Array, "T E"]:
        """Return the scores over the sum of the chosen experts' scores, times `scale`."""
        return self.scale * jnp.exp(pair_scores - _log_sums(selection, scores))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SqrtGateConfig(GateBase):
    """Square root of the renormalized score: keeps the RMS of the output for every K."""

    name: ClassVar[str] = "sqrt"

    def __call__(self, selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
        """Return gates whose squares sum to 1 per token."""
        return jnp.exp(0.5 * _log_shares(selection, scores))

    def pair_gates(
        self, selection: Selection, scores: Float[Array, " A"], pair_scores: Float[Array, "T E"]
    ) -> Float[Array, "T E"]:
        """Return the square root of the scores over the sum of the chosen experts' scores."""
        return jnp.exp(0.5 * (pair_scores - _log_sums(selection, scores)))

    def mix_shared(self, routed: Array, shared: Array) -> Array:
        """Return the sum of both branches times 1/sqrt(2), which keeps their RMS."""
        half = jnp.asarray(math.sqrt(0.5), routed.dtype)
        return half * routed + half * shared


def _check_scale(scale: float) -> None:
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"gate.scale={scale} must be finite and above 0; 1 leaves the gates alone")


def _log_shares(selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
    """Return log(exp(s_i) / sum_j exp(s_j)) over the slots of each token; -inf where empty."""
    if selection.top_k is None:
        raise ValueError(
            "this gate renormalizes over the experts of a token and needs a token-major selection:"
            " with routers in which experts choose tokens, use the gate softmax"
        )
    scores_TK = scores.reshape(-1, selection.top_k)  # A = T*K
    is_empty = jnp.isneginf(scores_TK)
    # A padding token has only empty slots: a finite value keeps its log_softmax free of NaN.
    stand_in = jnp.where(is_empty.all(-1, keepdims=True), 0.0, scores_TK)
    shares = jax.nn.log_softmax(stand_in, axis=-1)
    return jnp.where(is_empty, -jnp.inf, shares).reshape(-1)  # A = T*K


def _log_sums(selection: Selection, scores: Float[Array, " A"]) -> Float[Array, "T 1"]:
    """Return log(sum_j exp(s_j)) over the slots of each token; 0 where all are empty."""
    assert selection.top_k is not None  # a capacity is refused otherwise
    scores_TK = scores.reshape(-1, selection.top_k)  # A = T*K
    is_absent = jnp.isneginf(scores_TK).all(-1, keepdims=True)
    stand_in = jnp.where(is_absent, 0.0, scores_TK)
    return jnp.where(is_absent, 0.0, jax.nn.logsumexp(stand_in, axis=-1, keepdims=True))
