# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (RoPE, arXiv 2104.09864): pairs of features turn with the position.

Feature h of the first half is paired with feature h + H/2 of the second (the layout of Hugging
Face checkpoints), and turns by position * theta^(-2h/H). Angles are computed in f32.

A `RopeScaling` stretches the wavelengths for rows longer than those of pretraining: it multiplies
the frequency f of each feature, and the cosines and sines of all (s: factor, L: original length):

    linear     f / s                                    positions interpolated, arXiv 2306.15595
    dynamic    theta' = theta (s U / L - s + 1)^(H / (H - 2))    U: length of the row, at least L
    yarn       slow features f / s, fast ones f, a line in h between them    arXiv 2309.00071
    llama3     slow features f / s, fast ones f, a line in f between them    arXiv 2407.21783
    longrope   f / a searched factor of each feature, for short and for long rows  arXiv 2402.13753

Grouped-query attention has all of them. Latent attention has YaRN as in DeepSeek-V3: there all
logits are also multiplied by m(mscale_all_dim)^2, m(a) = 1 + a log(s) / 10.

To add a scaling: a config class here, its row in `jaxmoe/catalog/layers.py`, and its formula in
`tests/jaxmoe/layers/test_rotary.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import require_positive

RopeLayout = Literal["halves", "interleaved"]
"""Features that turn together: h and h + H/2, or 2h and 2h + 1."""


class RopeScaling(abc.ABC):
    """How the wavelengths of RoPE are stretched for rows longer than those of pretraining."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in configs and flags."""
    way_out: ClassVar[str] = ""
    """Setting with which the frequencies do not depend on the length of the row."""

    @property
    def reads_length(self) -> bool:
        """Whether the frequencies depend on the length of the row."""
        return False

    def check(self, half: int) -> None:
        """Check the sizes that depend on the features.

        Args:
            half: Pairs of features that turn.

        Raises:
            ValueError: A size does not fit; names the field.
        """
        del half

    def check_pages(self) -> None:
        """Check that the requests of a server can share a row of tokens.

        Raises:
            ValueError: The frequencies depend on the length of the row.
        """
        if self.reads_length:
            raise ValueError(
                f"rope_scaling:{self.name} stretches each row by its own length, and a server has"
                f" the tokens of many requests in one row: set rope_scaling.{self.way_out}, or"
                " generate with jaxmoe.generate"
            )

    @abc.abstractmethod
    def stretch(
        self, half: int, theta: float, length: Int[Array, "#B 1 1 1"] | None
    ) -> Float[Array, "... h"]:
        """Return the factor of the frequency of each pair of features, f32.

        Args:
            half: Pairs of features that turn (h).
            theta: Base of the wavelengths.
            length: Positions of each row, 1 + the largest; None unless `reads_length`.
        """

    def size(self, length: Int[Array, "#B 1 1 1"] | None = None) -> Any:
        """Return the factor of all cosines and sines, of each row where it depends on its length.

        Args:
            length: As for `stretch`.
        """
        del length
        return 1.0


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearScalingConfig(RopeScaling):
    """Linear interpolation: all frequencies are divided by one factor."""

    name: ClassVar[str] = "linear"

    factor: float = 1.0
    """Divisor of all frequencies."""

    def __post_init__(self):
        require_positive("rope_scaling", self, "factor")

    def stretch(
        self, half: int, theta: float, length: Int[Array, "#B 1 1 1"] | None
    ) -> Float[Array, " h"]:
        """Return 1 / factor for all features."""
        del theta, length
        return jnp.full((half,), 1.0 / self.factor, jnp.float32)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DynamicScalingConfig(RopeScaling):
    """NTK-aware scaling: the base of the wavelengths grows with the length of the row."""

    name: ClassVar[str] = "dynamic"
    way_out: ClassVar[str] = "length"

    factor: float = 1.0
    """Slope of the growth; 1 turns a row as long as its length over the original one."""
    original_length: int = 4096
    """Positions up to which nothing is stretched."""
    length: int | None = None
    """Length for which all rows are stretched. None takes the length of each row: 1 + the largest
    position of a call, so that cached keys keep the base with which they were written."""

    def __post_init__(self):
        require_positive("rope_scaling", self, "factor", "original_length")
        if self.length is not None and self.length < 1:
            raise ValueError(
                f"rope_scaling.length={self.length} must be at least 1, or None for the length of"
                " each row"
            )

    @property
    def reads_length(self) -> bool:
        """Whether no length is set."""
        return self.length is None

    def check(self, half: int) -> None:
        """Check that there are two pairs of features, as the exponent needs."""
        if half < 2:
            raise ValueError(
                "rope_scaling:dynamic needs 4 or more features that turn: set head_dim or"
                " rotary_dim, or choose rope_scaling:linear"
            )

    def stretch(
        self, half: int, theta: float, length: Int[Array, "#B 1 1 1"] | None
    ) -> Float[Array, "... h"]:
        """Return the ratio of the bases to the power -h / H, for each row."""
        del theta
        original = self.original_length
        rows = jnp.int32(self.length or original) if length is None else length
        ratio = jnp.maximum(rows, original).astype(jnp.float32) / original
        growth = self.factor * ratio - (self.factor - 1.0)
        powers = jnp.asarray(np.arange(half) / (half - 1), jnp.float32)
        return growth**-powers if length is None else growth ** -powers[None, None, None, :]


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig(RopeScaling):
    """YaRN: slow features are interpolated, fast ones stay, and logits are sharpened."""

    name: ClassVar[str] = "yarn"

    factor: float = 40.0
    """Ratio of the longest row to the rows of pretraining."""
    original_length: int = 4096
    """Positions of pretraining."""
    beta_fast: float = 32.0
    """Features that turn more often than this in the original length stay as they are."""
    beta_slow: float = 1.0
    """Features that turn less often are stretched by the whole factor."""
    mscale: float | None = 1.0
    """Weight of the factor of turned features, relative to mscale_all_dim; None for either turns
    them by 1 + log(factor) / 10."""
    mscale_all_dim: float | None = 1.0
    """Weight of the factor (1 + mscale_all_dim log(factor) / 10)^2 of the logits of latent
    attention; None for 1."""
    attention_factor: float | None = None
    """Factor of turned features; from mscale when None."""
    truncate: bool = True
    """Whether the ends of the line between fast and slow features are whole features."""

    def __post_init__(self):
        require_positive("yarn", self, "factor", "original_length", "beta_fast", "beta_slow")
        names = ("mscale", "mscale_all_dim", "attention_factor")
        require_positive("yarn", self, *(n for n in names if getattr(self, n) is not None))

    def stretch(
        self, half: int, theta: float, length: Int[Array, "#B 1 1 1"] | None
    ) -> Float[Array, " h"]:
        """Return 1 / factor for slow features, 1 for fast ones, and what is between."""
        del length
        edges = [
            half * math.log(self.original_length / (turns * 2.0 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        ]
        if self.truncate:
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        low = max(edges[0], 0)
        high = min(edges[1], 2 * half - 1)
        share = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return jnp.asarray(share / self.factor + 1.0 - share, jnp.float32)

    def size(self, length: Int[Array, "#B 1 1 1"] | None = None) -> float:
        """Return the factor of turned features."""
        del length
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    def logit_factor(self) -> float:
        """Return the factor of all logits of latent attention."""
        return 1.0 if self.mscale_all_dim is None else self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, weight: float) -> float:
        """Return the factor by which YaRN counters the entropy of longer rows."""
        return 1.0 + 0.1 * weight * math.log(max(1.0, self.factor))


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3ScalingConfig(RopeScaling):
    """Llama 3.1: long wavelengths are stretched, short ones stay."""

    name: ClassVar[str] = "llama3"

    factor: float = 8.0
    """Divisor of the frequencies of long wavelengths."""
    low_freq_factor: float = 1.0
    """Features that turn less often than this in the original length are stretched by it."""
    high_freq_factor: float = 4.0
    """Features that turn more often stay as they are."""
    original_length: int = 8192
    """Positions of pretraining."""

    def __post_init__(self):
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_length")
        require_positive("rope_scaling", self, *names)
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor} must be at least"
                f" rope_scaling.low_freq_factor={self.low_freq_factor}"
            )

    def stretch(
        self, half: int, theta: float, length: Int[Array, "#B 1 1 1"] | None
    ) -> Float[Array, " h"]:
        """Return 1 / factor for slow features, 1 for fast ones, and what is between."""
        del length
        turns = self.original_length * theta ** -(np.arange(half) / half) / (2.0 * math.pi)
        span = max(self.high_freq_factor - self.low_freq_factor, 1e-9)  # a step where it is 0
        share = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return jnp.asarray((1.0 - share) / self.factor + share, jnp.float32)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeConfig(RopeScaling):
    """LongRoPE: a searched divisor for each feature, one set for short rows and one for long."""

    name: ClassVar[str] = "longrope"
    way_out: ClassVar[str] = "rows to short or long"

    short_factor: tuple[float, ...] = ()
    """Divisor of the frequency of each pair of features in short rows; 1 for all when empty."""
    long_factor: tuple[float, ...] = ()
    """Divisors in long rows; 1 for all when empty."""
    original_length: int = 4096
    """Positions of pretraining; longer rows are long."""
    factor: float = 1.0
    """Ratio of the longest row to the rows of pretraining."""
    attention_factor: float | None = None
    """Factor of turned features; sqrt(1 + log(factor) / log(original_length)) when None."""
    long_attention_factor: float | None = None
    """Factor of turned features in rows that take the long divisors; that of the others when
    None."""
    rows: Literal["by_length", "short", "long"] = "by_length"
    """Set of divisors: that of the length of each row, 1 + the largest position of a call, so that
    cached keys keep the set with which they were written; or one set for rows of any length."""

    def __post_init__(self):
        require_positive("rope_scaling", self, "factor", "original_length")
        names = ("attention_factor", "long_attention_factor")
        require_positive(
            "rope_scaling", self, *(name for name in names if getattr(self, name) is not None)
        )
        for field in ("short_factor", "long_factor"):
            if any(divisor <= 0.0 for divisor in getattr(self, field)):
                raise ValueError(f"rope_scaling.{field} must have divisors above 0")

    @property
    def reads_length(self) -> bool:
        """Whether rows take the set of their length."""
        return self.rows == "by_length"

    def check(self, half: int) -> None:
        """Check that there is a divisor for each pair of features."""
        for field in ("short_factor", "long_factor"):
            number = len(getattr(self, field))
            if number not in (0, half):
                raise ValueError(
                    f"rope_scaling.{field} has {number} divisors, and {half} pairs of features"
                    " turn: give one for each pair, or none"
                )

    def stretch(
        self, half: int, theta: float, length: Int[Array, "#B 1 1 1"] | None
    ) -> Float[Array, "... h"]:
        """Return 1 / divisor of each feature, for each row."""
        del theta
        short, long = (
            1.0 / jnp.asarray(divisors or (1.0,) * half, jnp.float32)
            for divisors in (self.short_factor, self.long_factor)
        )
        if length is None:
            return long if self.rows == "long" else short
        is_long = length > self.original_length
        return jnp.where(is_long, long[None, None, None, :], short[None, None, None, :])

    def size(self, length: Int[Array, "#B 1 1 1"] | None = None) -> Any:
        """Return the factor of turned features, of each row where long rows have their own."""
        if self.long_attention_factor is None:
            return self._short_size()
        if length is None:
            return self.long_attention_factor if self.rows == "long" else self._short_size()
        is_long = length > self.original_length
        sizes = (self.long_attention_factor, self._short_size())
        return jnp.where(is_long, *map(jnp.float32, sizes))

    def _short_size(self) -> float:
        """Return the factor of turned features where long rows have no other."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1.0 + math.log(max(1.0, self.factor)) / math.log(self.original_length))


def rotary_angles(
    positions: Int[Array, "#B S"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "#B S 1 H"], Float[Array, "#B S 1 H"]]:
    """Return the factors of each feature and its partner, f32: cosines, and sines with a sign.

    Args:
        positions: Positions of the tokens; B is 1 where all rows share them.
        head_dim: H, features that turn, even.
        theta: Base of the wavelengths.
        scaling: Stretching for rows longer than those of pretraining.
    """
    half = head_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / half
    frequencies = jnp.float32(theta) ** -exponents
    if scaling is not None and not scaling.reads_length:
        frequencies = frequencies * scaling.stretch(half, theta, None)
    rows = positions.astype(jnp.float32)[:, :, None, None]
    frequencies = frequencies[None, None, None, :]
    length = None
    if scaling is not None and scaling.reads_length:
        length = jnp.max(positions, axis=1)[:, None, None, None] + 1
        frequencies = frequencies * scaling.stretch(half, theta, length)
    angles = rows * frequencies
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    if scaling is not None:
        size = jnp.asarray(scaling.size(length), jnp.float32)
        cos = size * cos
        sin = size * sin
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(
    x: Float[Array, "B S N H"], angles: tuple[Float[Array, "#B S 1 h"], Float[Array, "#B S 1 h"]]
) -> Float[Array, "B S N H"]:
    """Turn queries or keys by their positions.

    Args:
        x: Heads, in the layout "halves" of the features that turn.
        angles: Result of `rotary_angles` for the first h features; the others stay as they are.

    Returns:
        The turned heads, in the dtype of `x`.
    """
    cos, sin = angles
    width = cos.shape[-1]
    if width < x.shape[-1]:
        turned = rotate(x[..., :width], angles)
        return jnp.concatenate([turned, x[..., width:]], axis=-1)
    wide = x.astype(jnp.float32)
    partner = jnp.roll(wide, x.shape[-1] // 2, axis=-1)
    return (wide * cos + partner * sin).astype(x.dtype)


def in_halves(x: Float[Array, "B S N H"], layout: RopeLayout) -> Float[Array, "B S N H"]:
    """Return features in the layout of `rotate`; products of two heads do not depend on it.

    Args:
        x: Heads whose features all turn.
        layout: Their layout.
    """
    if layout == "halves":
        return x
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def rotate_in_place(
    x: Float[Array, "B S N H"],
    angles: tuple[Float[Array, "#B S 1 h"], Float[Array, "#B S 1 h"]],
    layout: RopeLayout,
) -> Float[Array, "B S N H"]:
    """Turn queries or keys by their positions, each feature at its place.

    Args:
        x: Heads.
        angles: Result of `rotary_angles` for the first h features; the others stay as they are.
        layout: Layout of these features.

    Returns:
        The turned heads, in the layout and the dtype of `x`.
    """
    if layout == "halves":
        return rotate(x, angles)
    width = angles[0].shape[-1]
    turned = rotate(in_halves(x[..., :width], layout), angles)
    pairs = jnp.stack([turned[..., : width // 2], turned[..., width // 2 :]], axis=-1)
    turned = pairs.reshape(*x.shape[:-1], width)
    return turned if width == x.shape[-1] else jnp.concatenate([turned, x[..., width:]], axis=-1)
