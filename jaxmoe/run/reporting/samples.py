# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates text from a model of a run."""

from __future__ import annotations

import jax
import numpy as np

from jaxmoe.generation.text import GenerationConfig, LoadedModel, continue_texts
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.training.state import TrainState

_ROWS = 2
"""Held-out rows that are continued, if there are as many."""


def sample_text(assembly: Assembly, state: TrainState, length: int) -> str:
    """Return text that the model generates after the first tokens of two held-out rows, or one.

    Args:
        assembly: Plan, devices and data of the run.
        state: State with parameters and router state.
        length: Number of tokens to generate; a model that is not causal fills one row.
    """
    training = assembly.plan.config.training
    source = assembly.source
    prompt_length = min(64, training.sequence_length)
    if not assembly.plan.model.attention.is_causal:
        # The model was trained on rows of this length only.
        prompt_length = training.sequence_length // 4
        length = training.sequence_length - prompt_length
    num_rows = source.num_rows("validation", prompt_length)
    numbers = range(_ROWS if num_rows is None else min(_ROWS, num_rows))
    rows = [source.row("validation", row, prompt_length).tokens[:prompt_length] for row in numbers]
    model = LoadedModel(
        config=assembly.plan.model,
        params=jax.device_get(state.params),
        router_state=jax.device_get(state.router_state),
    )
    config = GenerationConfig(length=length, sampling=SamplingConfig(temperature=0.8))
    samples = continue_texts(model, source, [*map(np.asarray, rows)], config)
    return "\n".join(map(str, samples))
