# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion: predict the masked tokens of a row from all that is left of it.

    t       uniform in (0, 1], one per row
    x_t     each real token of the row is replaced by the mask token with probability t
    loss    sum over masked s of nll(x_s | x_t) / t                       per row

In the mean over t and masks this is the negative evidence lower bound of the row in nats (linear
schedule alpha_t = 1 - t), which a perfect denoiser brings down to the row's own entropy. The mask
token is the last id of the model's vocabulary; it is read, and never predicted. What is not masked
is given, and costs nothing.

Times of a batch are stratified: row b takes the point u + r(b) mod 1, r the base-2 radical inverse
and u drawn per step, so that 2^m neighbouring rows fall into 2^m equal strata. Times and masks
depend on the run's key, the step and the row's number in the batch of the step: not on the mesh,
nor on how the batch is cut.

Evaluation counts instead of drawing t: n uniform over 1 to L, exactly n of the row's L real tokens
are masked, each weighs L / n. The expectation is the same integral (n given t is binomial, and the
mean of 1/t given n is (L + 1) / n), its variance far smaller. n takes `eval_times` values a row,
spread evenly, with fixed masks: the same number every time.

`Batch.loss_weights` belong to predictions of the token that follows, and are not read: every real
token counts 1.

Sources: MDLM (arXiv 2406.07524, sections 3.1 to 3.5), MD4 (arXiv 2406.04329) for the bound and the
antithetic times; LLaDA (arXiv 2502.09992, eq. 3 and 6) for the loss and the counted estimate.
Sampling is `jaxmoe/contrib/diffusion/diffuse.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

from jaxmoe.data.batch import Batch
from jaxmoe.data.source import Source
from jaxmoe.data.synthetic import SyntheticSource
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.objective import Objective
from sharding import axes as ax
from sharding.constrain import Placement

_STREAM = 0x6D61736B
"""Folded into a step's key, so that masks are independent of the routers' noise."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskedDiffusionConfig(Objective):
    """Predict masked tokens from the rest of the row; needs attention.is_causal False."""

    name: ClassVar[str] = "masked_diffusion"
    is_causal: ClassVar[bool] = False
    reads_loss_weights: ClassVar[bool] = False
    floor_note: ClassVar[str | None] = "where no token is given"
    """Condition under which `entropy_floor` differs from the entropy of the next token."""

    min_time: float = 1e-3
    """Smallest share of masked tokens in training; its inverse is the largest weight of a token."""
    eval_times: int = 8
    """Number of mask counts at which a held-out row is evaluated."""

    def __post_init__(self):
        if not 0.0 < self.min_time < 1.0:
            raise ValueError(
                f"objective.min_time={self.min_time} must lie between 0 and 1: a token is weighed"
                " by the inverse of the time"
            )
        if self.eval_times < 1:
            raise ValueError(f"objective.eval_times={self.eval_times} must be at least 1")

    @property
    def num_examined(self) -> int:
        """Passes over a held-out batch."""
        return self.eval_times

    def check(self, model: ModelConfig) -> None:
        """Raise if the model has no id for the mask.

        Raises:
            ValueError: Names the field.
        """
        if model.vocab_size < 2:
            raise ValueError(
                f"model.vocab_size={model.vocab_size} must be at least 2: its last id is the mask"
            )

    def num_predicted(self, model: ModelConfig) -> int:
        """Return the number of ids without the last, the mask."""
        return model.vocab_size - 1

    def token_counts(self, batch: Batch) -> Float[Array, "B S"]:
        """Return 1 for real tokens."""
        if batch.segment_ids is None:
            return jnp.ones_like(jnp.asarray(batch.loss_weights))
        return (jnp.asarray(batch.segment_ids) != 0).astype(jnp.float32)

    def entropy_floor(self, source: Source, sequence_length: int) -> float | None:
        """Return the lowest held-out loss in bits per token; None where it is not known.

        No token of a row is given, so that the first one counts too.
        """
        if not isinstance(source, SyntheticSource):
            return None
        return source.whole_row_bits_per_token(sequence_length)

    def prepare(
        self, model: ModelConfig, batch: Batch, key: Key[Array, ""], placement: Placement
    ) -> Batch:
        """Return the batch with masked tokens, the tokens as targets, and weights 1/t."""

        def law(is_real: Array, rows: Array, key: Array):
            of_times, of_masks = jax.random.split(key)
            # 32 random bits more turn the strata; integers wrap round as the times should.
            turned = radical_inverse(rows) + jax.random.bits(of_times, dtype=jnp.uint32)
            time = self.min_time + (1.0 - self.min_time) * _fraction(turned)
            is_masked = _noise(of_masks, rows, is_real.shape[1]) < time[:, None]
            return is_masked & is_real, time

        return _mask(model, batch, jax.random.fold_in(key, _STREAM), placement, law)

    def examine(
        self, model: ModelConfig, batch: Batch, index: Int[Array, ""], placement: Placement
    ) -> Batch:
        """Return pass `index` over a held-out batch, with a fixed number of masks per row."""

        def law(is_real: Array, rows: Array, pair: tuple[Array, Array]):
            key, index = pair
            step = (index.astype(jnp.float32) + _fraction(radical_inverse(rows))) / self.eval_times
            length = is_real.sum(1, dtype=jnp.int32)
            number = jnp.minimum(1 + (step * length.astype(jnp.float32)).astype(jnp.int32), length)
            noise = jnp.where(is_real, _noise(key, rows, is_real.shape[1]), jnp.inf)
            rank = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
            ratio = number.astype(jnp.float32) / jnp.maximum(length, 1).astype(jnp.float32)
            return (rank < number[:, None]) & is_real, ratio

        key = jax.random.fold_in(jax.random.key(_STREAM), index)
        return _mask(model, batch, (key, index), placement, law)


def radical_inverse(numbers: Int[Array, " B"]) -> UInt[Array, " B"]:
    """Return the bits of each number reversed: 2^32 times its van der Corput point.

    Args:
        numbers: At least 0.
    """
    bits = numbers.astype(jnp.uint32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        low = (bits & jnp.uint32(mask)) << jnp.uint32(shift)
        bits = low | ((bits >> jnp.uint32(shift)) & jnp.uint32(mask))
    return (bits << jnp.uint32(16)) | (bits >> jnp.uint32(16))


def _fraction(bits: UInt[Array, " B"]) -> Float[Array, " B"]:
    """Return exact f32 values in [0, 1) from the upper 24 bits."""
    return (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)


def _noise(key: Key[Array, ""], rows: Int[Array, " B"], length: int) -> Float[Array, "B S"]:
    """Return uniform numbers in [0, 1) that depend on the row number only."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
    return jax.vmap(lambda row: jax.random.uniform(row, (length,), jnp.float32))(keys)


def _mask(
    model: ModelConfig,
    batch: Batch,
    keys: Any,
    placement: Placement,
    law: Callable[[Array, Array, Any], tuple[Array, Array]],
) -> Batch:
    """Return the batch with tokens masked by a function of its rows.

    Args:
        model: Model; its last id is the mask.
        batch: Rows, numbered as they stand.
        keys: Scalars for `law`.
        placement: Layout of the rows.
        law: (real tokens [b S], row numbers [b], given) -> (masked [b S], ratio [b]).
    """
    tokens = jnp.asarray(batch.tokens)

    def on_rows(tokens: Array, is_real: Array, rows: Array, keys: Any, *, batch_axes):
        del batch_axes
        is_masked, ratio = law(is_real, rows, keys)
        mask_token = jnp.asarray(model.vocab_size - 1, tokens.dtype)
        weights = jnp.where(is_masked, 1.0 / ratio[:, None], 0.0)
        ratios = jnp.broadcast_to(ratio[:, None], tokens.shape)
        return jnp.where(is_masked, mask_token, tokens), weights, ratios

    of_tokens = (ax.ACT_BATCH, None)
    segments = batch.segment_ids
    is_real = jnp.ones_like(tokens, bool) if segments is None else jnp.asarray(segments) != 0
    region = placement.region(
        on_rows,
        in_axes=(of_tokens, of_tokens, (ax.ACT_BATCH,), jax.tree.map(lambda _: (), keys)),
        out_axes=(of_tokens, of_tokens, of_tokens),
    )
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    noisy, weights, ratios = region(tokens, is_real, rows, keys)
    return dataclasses.replace(
        batch, tokens=noisy, targets=tokens, loss_weights=weights, mask_ratio=ratios
    )
