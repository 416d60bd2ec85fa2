# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a model on each next token, and its modules on the tokens further ahead.

    loss = nll + weight / K * sum over k of nll of t_{i+k+1} from module k

Both sums have one divisor, the loss weights of the next tokens (T of the source). A prediction of
module k counts with the loss weight of its target, and not where t_{i+k} lies in another document
or behind the end of the row. The logged loss is that of the next token, and the further term is
among the losses; held-out losses are those of the next token.

Source: DeepSeek-V3, arXiv 2412.19437, equations 21 to 25: weight 0.3 for the first 10T tokens, then
0.1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxmoe.contrib.multi_token_prediction.modules import module_outputs
from jaxmoe.data.batch import Batch
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Output, balance_losses
from jaxmoe.training.next_token import NextTokenConfig
from jaxmoe.training.objective import LossCall
from sharding import axes as ax
from sharding.constrain import Placement

_TOKENS: Final = "ahead_tokens"
_TARGETS: Final = "ahead_targets"
_WEIGHTS: Final = "ahead_weights"
_MASK: Final = "ahead_mask"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MultiTokenPredictionConfig(NextTokenConfig):
    """Predict each token, and those further ahead by the modules of the model (DeepSeek-V3)."""

    name: ClassVar[str] = "multi_token_prediction"

    weight: float = 0.3
    """Factor of the mean loss of the modules."""

    def __post_init__(self):
        if not self.weight > 0.0:
            raise ValueError(
                f"objective.weight={self.weight} must be above 0; without the term choose the"
                " objective next_token, and a model without modules"
            )

    def check(self, model: ModelConfig) -> None:
        """Raise if the model has no modules.

        Raises:
            ValueError: Names the field.
        """
        _depth(model)

    def prepare(
        self, model: ModelConfig, batch: Batch, key: Key[Array, ""], placement: Placement
    ) -> Batch:
        """Return the batch with what the modules read and predict, in its extra arrays [B S K]."""
        del key
        depth = _depth(model)
        rows = (ax.ACT_BATCH, None)
        arrays = {
            "tokens": jnp.asarray(batch.tokens),
            "targets": jnp.asarray(batch.targets),
            "weights": jnp.asarray(batch.loss_weights),
        }
        if batch.segment_ids is not None:
            arrays["segments"] = jnp.asarray(batch.segment_ids)
        names = (_TOKENS, _TARGETS, _WEIGHTS, _MASK)

        def run(arrays: dict[str, Array], *, batch_axes: tuple[str, ...]) -> dict[str, Array]:
            del batch_axes
            return shift_rows(arrays, depth)

        region = placement.region(
            run,
            in_axes=(dict.fromkeys(arrays, rows),),
            out_axes=dict.fromkeys(names, (*rows, None)),
        )
        return dataclasses.replace(batch, extra=batch.extra | region(arrays))

    def further_loss(self, call: LossCall) -> tuple[Float[Array, ""], Output]:
        """Return the weighted sum of the modules' losses, and the output with their statistics."""
        model = call.model
        batch = call.batch
        output = call.output
        extra = {name: jnp.asarray(array) for name, array in batch.extra.items()}
        arrays = {"tokens": jnp.asarray(batch.tokens), "context": call.context}
        for name in ("positions", "segment_ids"):
            if (array := getattr(batch, name)) is not None:
                arrays[name] = jnp.asarray(array)
        options = call.options
        _, outputs = module_outputs(
            model,
            call.execution.declaring(),  # their parameters are on the device, and their rows whole
            call.params,
            output.hidden,
            arrays,
            extra[_TOKENS],
            extra[_MASK],
            order=call.order,
            router_state=options.get("router_state"),
            key=options.get("key"),
            train=True,
        )
        depth = extra[_TOKENS].shape[2]
        total = jnp.zeros((), jnp.float32)
        for k in range(depth):
            rows = Batch(
                tokens=batch.tokens,
                targets=extra[_TARGETS][:, :, k],
                loss_weights=extra[_WEIGHTS][:, :, k],
            )
            total = total + call.loss_of(outputs.hidden[k], rows)
        factor = jnp.float32(self.weight / depth)
        return factor * total, _with_modules(model, output, outputs.layer)


def shift_rows(arrays: dict[str, Array], depth: int) -> dict[str, Array]:
    """Return tokens, targets, weights and the mask of each module, [B S K].

    Args:
        arrays: `tokens`, `targets` and `weights` [B S], and `segments` where rows have documents.
        depth: K.
    """
    columns: dict[str, list[Array]] = {_TOKENS: [], _TARGETS: [], _WEIGHTS: [], _MASK: []}
    tokens = arrays["tokens"]
    segments = arrays.get("segments", jnp.ones_like(tokens))
    for k in range(1, depth + 1):
        later = {name: _shift(array, k) for name, array in arrays.items()}
        later_segments = later.get("segments", _shift(segments, k))
        is_inside = (later_segments == segments) & (segments != 0)
        columns[_TOKENS].append(jnp.where(is_inside, later["tokens"], tokens))
        columns[_TARGETS].append(later["targets"])
        columns[_WEIGHTS].append(jnp.where(is_inside, later["weights"], 0.0))
        columns[_MASK].append(is_inside)
    return {name: jnp.stack(parts, axis=-1) for name, parts in columns.items()}


def _shift(array: Array, k: int) -> Array:
    """Return x[:, i + k] at place i, 0 behind the end of the row."""
    k = min(k, array.shape[1])
    return jnp.pad(array[:, k:], ((0, 0), (0, k)))


def _with_modules(model: ModelConfig, output: Output, layers: Any) -> Output:
    """Return the output with statistics and losses of the modules' layers behind the model's."""
    statistics = output.statistics
    losses = output.losses
    if layers.statistics is not None:
        parts = [part for part in (statistics, layers.statistics) if part is not None]
        statistics = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        losses = losses | balance_losses(model, statistics)
    for name, value in layers.losses.items():
        added = jnp.sum(value)
        losses = losses | {name: losses[name] + added if name in losses else added}
    return dataclasses.replace(output, statistics=statistics, losses=losses)


def _depth(model: ModelConfig) -> int:
    """Return the modules of a model.

    Raises:
        ValueError: It has none.
    """
    predictor: Any = model.extras.predictor
    if getattr(predictor, "objective", None) != MultiTokenPredictionConfig.name:
        raise ValueError(
            "the objective trains modules of the model, and model.options.predictor is not set: set"
            " it to multi_token_prediction"
        )
    return predictor.depth
