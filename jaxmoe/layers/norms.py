# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Normalises the last dimension of activations, in f32.

    rms          y = gain x / sqrt(mean(x^2) + epsilon)                        (arXiv 1910.07467)
    centred_rms  y = (1 + gain) x / sqrt(mean(x^2) + epsilon)
    layer        y = gain (x - mean(x)) / sqrt(var(x) + epsilon) + bias        (arXiv 1607.06450)

`ModelConfig.norm` is the norm of the halves of all layers and the final one, and
`ModelConfig.norm_place` says where a half f has it:

    before    x + f(norm(x))
    after     x + norm(f(x))                                                 (arXiv 2501.00656)
    both      x + norm'(f(norm(x)))

A layer that declares
its parameters itself, such as a QK-norm, takes `declarations` and `apply` of the config.

To add a norm: a config that extends `NormBase`, its row under `norm` in `jaxmoe/catalog/layers.py`,
a row of NORMS in `tests/jaxmoe/layers/test_norms.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.catalog import Registry
from jaxmoe.declarations import Declaration, declare
from sharding import axes as ax

NormPlace = Literal["before", "after", "both"]
"""Where the halves of a layer have their norms: on their inputs, on their outputs before these are
added to the residual stream, or on both."""


def rms_norm(
    x: Float[Array, "*B D"], gain: Float[Array, " D"], epsilon: float
) -> Float[Array, "*B D"]:
    """Normalise the last dimension to RMS 1, times the gain, in the dtype of `x`.

    Args:
        x: Array of any float dtype.
        gain: Factor of each feature.
        epsilon: Term added to the mean square.
    """
    wide = x.astype(jnp.float32)
    return (_to_unit(wide, epsilon) * _of_features(gain, x.ndim)).astype(x.dtype)


def unit_norm(x: Float[Array, "*B D"], epsilon: float) -> Float[Array, "*B D"]:
    """Normalise the last dimension to RMS 1, without gains, in the dtype of `x`.

    Args:
        x: Array of any float dtype.
        epsilon: Term added to the mean square.
    """
    return _to_unit(x.astype(jnp.float32), epsilon).astype(x.dtype)


def _to_unit(wide: Array, epsilon: float) -> Array:
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(mean_square + epsilon)


def layer_norm(
    x: Float[Array, "*B D"],
    gain: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    epsilon: float,
) -> Float[Array, "*B D"]:
    """Normalise the last dimension to mean 0 and variance 1, in the dtype of `x`.

    Args:
        x: Array of any float dtype.
        gain: Factor of each feature.
        bias: Addend of each feature; None adds nothing.
        epsilon: Term added to the variance.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon) * _of_features(gain, x.ndim)
    if bias is not None:
        y = y + _of_features(bias, x.ndim)
    return y.astype(x.dtype)


def _of_features(vector: Array, ndim: int) -> Array:
    """Return a vector of features in f32, with leading dimensions of 1."""
    return vector.astype(jnp.float32).reshape((1,) * (ndim - 1) + vector.shape)


class NormBase(abc.ABC):
    """Base class of the configs of norms."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""

    @abc.abstractmethod
    def declarations(self, dim: int) -> dict[str, Declaration]:
        """Return the parameters by name; the first one is `gain`.

        Args:
            dim: Features that are normalised.
        """

    @abc.abstractmethod
    def apply(
        self, x: Float[Array, "*B D"], weights: Mapping[str, Array], epsilon: float
    ) -> Float[Array, "*B D"]:
        """Return the last dimension of `x` normalised, in its dtype.

        Args:
            x: Array of any float dtype.
            weights: Values of the parameters of `declarations`, by name.
            epsilon: Term added to the mean square or the variance.
        """

    def build(self, dim: int, epsilon: float, *, name: str | None = None) -> Norm:
        """Return the module of one norm.

        Args:
            dim: Features that are normalised.
            epsilon: Term added to the mean square or the variance.
            name: Name among the parameters.
        """
        return Norm(dim, epsilon, self, name=name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RmsNormConfig(NormBase):
    """Divides features by their root mean square (RMSNorm)."""

    name: ClassVar[str] = "rms"

    def declarations(self, dim: int) -> dict[str, Declaration]:
        """Return the gains, initially 1."""
        return {"gain": _vector(dim, "ones")}

    def apply(
        self, x: Float[Array, "*B D"], weights: Mapping[str, Array], epsilon: float
    ) -> Float[Array, "*B D"]:
        """Return `x` divided by its root mean square, times the gains."""
        return rms_norm(x, weights["gain"], epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CentredRmsNormConfig(NormBase):
    """RMSNorm whose factors are 1 + gain, so that weight decay draws them to 1."""

    name: ClassVar[str] = "centred_rms"

    def declarations(self, dim: int) -> dict[str, Declaration]:
        """Return the gains, initially 0."""
        return {"gain": _vector(dim, "zeros")}

    def apply(
        self, x: Float[Array, "*B D"], weights: Mapping[str, Array], epsilon: float
    ) -> Float[Array, "*B D"]:
        """Return `x` divided by its root mean square, times 1 + the gains."""
        return rms_norm(x, weights["gain"].astype(jnp.float32) + jnp.float32(1.0), epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerNormConfig(NormBase):
    """Subtracts the mean of the features and divides by their deviation (LayerNorm)."""

    name: ClassVar[str] = "layer"

    has_bias: bool = False
    """Whether a learned vector is added, initially 0."""

    def declarations(self, dim: int) -> dict[str, Declaration]:
        """Return the gains, initially 1, and the biases."""
        weights = {"gain": _vector(dim, "ones")}
        if self.has_bias:
            weights["bias"] = _vector(dim, "zeros")
        return weights

    def apply(
        self, x: Float[Array, "*B D"], weights: Mapping[str, Array], epsilon: float
    ) -> Float[Array, "*B D"]:
        """Return `x` without its mean, divided by its deviation, times the gains, plus biases."""
        return layer_norm(x, weights["gain"], weights.get("bias"), epsilon)


def _vector(dim: int, init: Any) -> Declaration:
    return Declaration(shape=(dim,), axes=(ax.NORM,), role="norm", matrix=None, init=init)


class Norm(nn.Module):
    """A norm over the last dimension.

    Attributes:
        dim: Features that are normalised.
        epsilon: Term added to the mean square or the variance.
        config: Kind of norm.
    """

    dim: int
    epsilon: float
    config: NormBase

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return `x` normalised."""
        declarations = self.config.declarations(self.dim)
        weights = {name: declare(self, name, row) for name, row in declarations.items()}
        return self.config.apply(x, weights, self.epsilon)


NORMS = Registry("norm")
