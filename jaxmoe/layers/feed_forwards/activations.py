# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Activations: functions from the projections of a token to the hidden units of a feed-forward.

    swiglu           silu(g) u
    clamped_swiglu   c sigmoid(alpha c) (d + offset)      c = min(g, limit), d = u within +-limit
    geglu            gelu(g) u
    relu_squared     max(u, 0)^2

A gated activation reads a gate g and an up projection u, the two halves of `gate_up [D 2 F]`; one
without a gate reads u alone, and the matrix is then [D 1 F].

`swiglu` is computed by `pallas_kernels.grouped_swiglu`, in one operation with the products. With
any other activation the experts are two grouped products and the activation between them, whose
result is an array.

Sources: GLU variants (arXiv 2002.05202); squared ReLU, Primer (arXiv 2109.08668); the clamped form
is that of gpt-oss (arXiv 2508.10925), and with alpha 1 and offset 0 that of DeepSeek-V4.

To add an activation: a config in jaxmoe/layers/feed_forwards/activations.py, its row under
`activation` in jaxmoe/catalog/layers.py, its name in tests/test_architecture.py, and its formula in
tests/jaxmoe/layers/feed_forwards/test_activations.py.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Projections = Callable[[int], Array]
"""Returns a projection [*T F] of each token: 0 is the gate and 1 the up projection, or 0 the only
one."""


class ActivationBase(abc.ABC):
    """Base class of the configs of activations; one has no sizes, so the config is the function."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in the registry and on the command line."""
    num_projections: ClassVar[int]
    """Projections of a token that it reads: a gate and an up projection, or 1."""
    has_kernel: ClassVar[bool]
    """Whether `grouped_swiglu` computes it together with the products of the experts."""

    @abc.abstractmethod
    def __call__(self, projections: Projections) -> Float[Array, "*T F"]:
        """Return the hidden units in the dtype of the projections.

        Args:
            projections: Gate and up projection, or the up projection alone.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SwiGLUConfig(ActivationBase):
    """The up projection times silu of the gate."""

    name: ClassVar[str] = "swiglu"
    num_projections: ClassVar[int] = 2
    has_kernel: ClassVar[bool] = True

    def __call__(self, projections: Projections) -> Float[Array, "*T F"]:
        """Return silu(gate) times the up projection."""
        return jax.nn.silu(projections(0)) * projections(1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClampedSwiGLUConfig(ActivationBase):
    """SwiGLU whose projections are clamped, with a steeper sigmoid and a shifted up projection."""

    name: ClassVar[str] = "clamped_swiglu"
    num_projections: ClassVar[int] = 2
    has_kernel: ClassVar[bool] = False

    limit: float = 7.0
    """Largest gate, and largest absolute up projection."""
    alpha: float = 1.702
    """Factor of the gate within the sigmoid; 1 for silu."""
    offset: float = 1.0
    """Term added to the clamped up projection."""

    def __post_init__(self):
        if not self.limit > 0.0:
            raise ValueError(
                f"activation.limit={self.limit} must be above 0; inf clamps nothing, as does the"
                " activation swiglu"
            )
        if not 0.0 < self.alpha < float("inf"):
            raise ValueError(f"activation.alpha={self.alpha} must be finite and above 0")

    def __call__(self, projections: Projections) -> Float[Array, "*T F"]:
        """Return the clamped gate times its sigmoid times the shifted up projection."""
        gate = projections(0)
        up = projections(1)
        gate = jnp.minimum(gate, jnp.asarray(self.limit, gate.dtype))
        limit = jnp.asarray(self.limit, up.dtype)
        up = jnp.clip(up, -limit, limit) + jnp.asarray(self.offset, up.dtype)
        return gate * jax.nn.sigmoid(jnp.asarray(self.alpha, gate.dtype) * gate) * up


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeGLUConfig(ActivationBase):
    """The up projection times the Gaussian error linear unit of the gate."""

    name: ClassVar[str] = "geglu"
    num_projections: ClassVar[int] = 2
    has_kernel: ClassVar[bool] = False

    is_approximate: bool = False
    """Whether the normal distribution function is approximated by tanh (`gelu_pytorch_tanh`)."""

    def __call__(self, projections: Projections) -> Float[Array, "*T F"]:
        """Return gelu(gate) times the up projection."""
        return jax.nn.gelu(projections(0), approximate=self.is_approximate) * projections(1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReLUSquaredConfig(ActivationBase):
    """The square of the positive part of the only projection: no gate."""

    name: ClassVar[str] = "relu_squared"
    num_projections: ClassVar[int] = 1
    has_kernel: ClassVar[bool] = False

    def __call__(self, projections: Projections) -> Float[Array, "*T F"]:
        """Return the square of the positive part."""
        return jnp.square(jax.nn.relu(projections(0)))
