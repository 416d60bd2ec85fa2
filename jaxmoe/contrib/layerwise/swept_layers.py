# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adds the loss after a few parallel sweeps over the layers to that of the next token (SNLP).

    loss = nll + weight * nll after s sweeps        s drawn from 1 to `sweeps` in each step

`jaxmoe.contrib.layerwise.layer_parallel` defines a sweep, which evaluates equal layers at once. A
model that is trained with it is nearer to its exact output after few of them. A step costs about as
much as 1 + `sweeps` steps. The logged loss is that of the next token, and the further term is among
the losses.

Reading: the repository states weights from 0.0625 to 0.5 over sampled configurations; a
configuration is taken to be a number of sweeps over all equal layers.

Source: the method of the repository phymhan/nanochat-snlp.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.contrib.layerwise.chain import Chain
from jaxmoe.contrib.layerwise.layer_parallel import parallel_scan, sweep_streams
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Output
from jaxmoe.training.next_token import NextTokenConfig
from jaxmoe.training.objective import LossCall

_OF_SWEEPS: Final = 0x5E  # separates its draws from those of routers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SweptLayersConfig(NextTokenConfig):
    """Predict each token, also from layers that are evaluated in parallel sweeps (SNLP)."""

    name: ClassVar[str] = "swept_layers"

    weight: float = 0.25
    """Factor of the loss after the sweeps; the source has 0.0625 to 0.5."""
    sweeps: int = 2
    """Largest number of sweeps that is drawn."""

    def __post_init__(self):
        if self.weight <= 0.0:
            raise ValueError(
                f"training.objective.weight={self.weight} must be above 0; without the term train"
                " with next_token"
            )
        if self.sweeps < 1:
            raise ValueError(f"training.objective.sweeps={self.sweeps} must be at least 1")

    def check(self, model: ModelConfig) -> None:
        """Raise if the model cannot be trained with it.

        Raises:
            ValueError: Its layers cannot be evaluated in parallel.
        """
        parallel_scan(model)

    def further_loss(self, call: LossCall) -> tuple[Float[Array, ""], Output]:
        """Return the weighted sum of the losses after some sweeps, and the output as it is."""
        batch = call.batch
        state = call.options.get("router_state")
        chain = Chain.of(call.model, call.execution, call.params, state)
        segments = None if batch.segment_ids is None else jnp.asarray(batch.segment_ids)
        streams = sweep_streams(
            chain, jnp.asarray(batch.tokens), segments, self.sweeps, is_batched=False
        )
        key = jax.random.fold_in(call.options["key"], _OF_SWEEPS)
        drawn = jax.random.randint(key, (), 0, self.sweeps)
        stream = jax.tree.map(lambda *parts: jnp.take(jnp.stack(parts), drawn, axis=0), *streams)
        summed = call.loss_of(chain.norm_output(stream), batch)
        return jnp.float32(self.weight) * summed, call.output
