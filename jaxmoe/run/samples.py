# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates text from a model of a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxmoe.data import Source
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import generate
from jaxmoe.models.diffuse import diffuse
from jaxmoe.run.assemble import Assembly
from jaxmoe.training.state import TrainState


def sample_text(assembly: Assembly, state: TrainState, length: int) -> str:
    """Text that the trained model writes after the first tokens of held-out rows."""
    training, source = assembly.plan.config.training, assembly.source
    prompt_length = min(64, training.sequence_length)
    if not assembly.plan.model.attention.is_causal:
        # It has learnt to fill rows of one length, and may see no position beyond it.
        prompt_length = training.sequence_length // 4
        length = training.sequence_length - prompt_length
    rows = [source.row("validation", row, prompt_length).tokens[:prompt_length] for row in (0, 1)]
    params = jax.device_get(state.params)
    router_state = jax.device_get(state.router_state)
    return continue_rows(
        assembly.plan.model, source, params, router_state, np.stack(rows), length, temperature=0.8
    )


def continue_rows(
    model: ModelConfig,
    source: Source,
    params: Any,
    router_state: Any,
    prompts: np.ndarray,
    length: int,
    *,
    temperature: float,
    seed: int = 0,
    execution: ExecutionConfig | None = None,
) -> str:
    """Prompts and their continuations as text, on one device.

    Args:
        model: of the parameters.
        source: that decodes tokens.
        params: on the host.
        router_state: on the host.
        prompts: [rows, tokens].
        length: tokens to write.
        temperature: of the sampling; 0 is greedy.
        seed: of the sampling.
        execution: how it is computed; defaults when None.
    """
    write = generate if model.attention.is_causal else fill_after
    written = write(
        model,
        params,
        jax.numpy.asarray(prompts),
        num_tokens=length,
        key=jax.random.key(seed),
        temperature=temperature,
        router_state=router_state,
        execution=execution,
    )
    texts = (
        f"--- prompt\n{source.decode(prompt)}\n--- continued\n{source.decode(row)}\n"
        for prompt, row in zip(prompts, np.asarray(written), strict=True)
    )
    return "\n".join(texts)


def fill_after(
    model: ModelConfig, params: Any, prompt: jax.Array, *, num_tokens: int, **given: Any
) -> jax.Array:
    """What masked diffusion fills in after prompts of one length: [rows, num_tokens].

    Args:
        model: not causal.
        params: of the model.
        prompt: [rows, tokens].
        num_tokens: to fill in.
        **given: further arguments of `diffuse`.
    """
    room = ((0, 0), (0, num_tokens))
    is_given = jax.numpy.pad(jax.numpy.ones_like(prompt, bool), room)
    tokens = jax.numpy.pad(prompt, room)
    # Twice as many steps as tokens: seldom are two filled in at once.
    filled = diffuse(model, params, tokens, is_given, num_steps=2 * num_tokens, **given)
    return filled[:, prompt.shape[1] :]
