# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Continues texts by masked diffusion: what comes after prompts of one length is filled in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax
import numpy as np

from jaxmoe.contrib.diffusion.diffuse import diffuse
from jaxmoe.generation.text import GenerationConfig, LoadedModel, WriterConfig
from jaxmoe.models.config import ModelConfig

STEPS_PER_TOKEN = 2.0
"""Steps of masked diffusion for each token: two tokens are seldom filled in at once then."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FillInConfig(WriterConfig):
    """All tokens from masks, in any order."""

    name: ClassVar[str] = "fill_in"

    def fits(self, model: ModelConfig) -> bool:
        """Return whether the model sees both sides of a gap."""
        return not model.attention.is_causal

    def write(
        self,
        model: LoadedModel,
        prompts: Sequence[Sequence[int] | np.ndarray],
        config: GenerationConfig,
        *,
        at_once: int,
    ) -> Iterable[Iterable[np.ndarray]]:
        """Return all tokens as one part."""
        if model.programs is not None:
            raise ValueError(
                "model.attention.is_causal=False: this model has no cache, and is computed whole:"
                " leave --layers and --experts out"
            )
        if len({len(prompt) for prompt in prompts}) > 1:
            raise ValueError(
                "model.attention.is_causal=False: this model continues prompts of one length"
                " together, and these have several: give them one at a time"
            )
        rows = np.stack(prompts)
        padding = ((0, 0), (0, config.length))
        seeds = [(config.seed + row) % 2**31 for row in range(len(rows))]
        filled = diffuse(
            model.config,
            model.params,
            jax.numpy.asarray(np.pad(rows, padding)),
            jax.numpy.asarray(np.pad(np.ones_like(rows, bool), padding)),
            num_steps=math.ceil(STEPS_PER_TOKEN * config.length),
            keys=jax.vmap(jax.random.key)(np.asarray(seeds, np.int32)),
            sampling=config.sampling,
            router_state=model.router_state,
            execution=model.execution,
        )
        return [np.asarray(filled)[:, rows.shape[1] :]]
