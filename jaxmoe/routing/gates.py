# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gates: what multiplies an expert's output, from the log scores of the chosen experts.

    softmax        g_i = scale exp(s_i)                       the router's score as it is
    renormalized   g_i = scale exp(s_i) / sum_j exp(s_j)      over the K chosen of a token
    sqrt           g_i = sqrt(exp(s_i) / sum_j exp(s_j))      SqrtGate

`scale` is the routed scaling factor: it sets the size of the routed branch beside the shared one
(DeepSeek-V3: 2.5). DeepSeek's code does not divide where K = 1; here `renormalized` always does, so
that its gate is then the constant `scale`: for DeepSeek's K = 1 take `softmax` with that scale.

SqrtGate keeps the size of the mixture: for uncorrelated expert outputs of RMS r, the sum has RMS
r * |g|_2, which is r for sqrt whatever K and temperature, and r/sqrt(K) for renormalized gates of a
uniform router. A shared expert is mixed in with both branches times 1/sqrt(2) (`mix_shared`).
It is computed as exp(0.5 * log_softmax(s)), finite in value and slope where a probability
underflows.

Sources: HyperP (arXiv 2603.28743; ArchScale adds the 1/sqrt(2) for shared experts); for the scale
DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437, section 4.2).

To add a gate: a config with `name`, `__call__` and `mix_shared`, into GateConfig in
`jaxmoe/routing/__init__.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import Selection


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxGateConfig:
    """The router's own score."""

    name: ClassVar[str] = "softmax"

    scale: float = 1.0
    """Routed scaling factor: multiplies every gate."""

    def __post_init__(self):
        _check_scale(self.scale)

    def build(self) -> SoftmaxGateConfig:
        """A gate has no sizes: the config is the gate."""
        return self

    def __call__(self, selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
        """Gates of a selection.

        Args:
            selection: what was chosen.
            scores: log scores of the pairs, usually `selection.scores`; apart, so that a gradient
                can be taken in them and a biased choice be weighed by unbiased scores.

        Returns:
            f32, exactly 0 where the slot is empty.
        """
        del selection
        return self.scale * jnp.exp(scores)

    def mix_shared(self, routed: Array, shared: Array) -> Array:
        """The routed and the shared experts' outputs, added."""
        return routed + shared


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RenormalizedGateConfig:
    """Scores divided by their sum over the chosen experts of the token."""

    name: ClassVar[str] = "renormalized"

    scale: float = 1.0
    """Routed scaling factor: what the gates of a token sum to."""

    def __post_init__(self):
        _check_scale(self.scale)

    def build(self) -> RenormalizedGateConfig:
        """A gate has no sizes: the config is the gate."""
        return self

    def __call__(self, selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
        """Gates that sum to `scale` per token; see `SoftmaxGateConfig.__call__`."""
        return self.scale * jnp.exp(_log_shares(selection, scores))

    def mix_shared(self, routed: Array, shared: Array) -> Array:
        """The routed and the shared experts' outputs, added."""
        return routed + shared


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SqrtGateConfig:
    """Square root of the renormalized score: keeps the RMS of the output for every K."""

    name: ClassVar[str] = "sqrt"

    def build(self) -> SqrtGateConfig:
        """A gate has no sizes: the config is the gate."""
        return self

    def __call__(self, selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
        """Gates whose squares sum to 1 per token; see `SoftmaxGateConfig.__call__`."""
        return jnp.exp(0.5 * _log_shares(selection, scores))

    def mix_shared(self, routed: Array, shared: Array) -> Array:
        """Both branches times 1/sqrt(2), so that the sum keeps the RMS of each."""
        half = jnp.asarray(math.sqrt(0.5), routed.dtype)
        return half * routed + half * shared


def _check_scale(scale: float) -> None:
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"gate.scale={scale} must be finite and above 0; 1 leaves the gates alone")


def _log_shares(selection: Selection, scores: Float[Array, " A"]) -> Float[Array, " A"]:
    """log(exp(s_i) / sum_j exp(s_j)) over the slots of each token; -inf where empty."""
    if selection.top_k is None:
        raise ValueError(
            "this gate renormalizes over the experts of a token and needs a token-major selection:"
            " routers in which experts choose tokens bring their own gates"
        )
    scores_TK = scores.reshape(-1, selection.top_k)  # A = T*K
    is_empty = jnp.isneginf(scores_TK)
    # A padding token has only empty slots: a finite stand-in keeps its log_softmax free of NaN.
    stand_in = jnp.where(is_empty.all(-1, keepdims=True), 0.0, scores_TK)
    shares = jax.nn.log_softmax(stand_in, axis=-1)
    return jnp.where(is_empty, -jnp.inf, shares).reshape(-1)  # A = T*K
