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
from jaxmoe.run.results import Sample
from jaxmoe.training.state import TrainState


def check_sampling(prompt: str, length: int, temperature: float) -> None:
    """Check the arguments of a generation.

    Args:
        prompt: Text to continue.
        length: Number of tokens to generate.
        temperature: Divisor of the logits.

    Raises:
        ValueError: One of them is out of range.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or above")
    if not prompt:
        raise ValueError("prompt is empty: give at least one character")


def sample_text(assembly: Assembly, state: TrainState, length: int) -> str:
    """Return text that the model generates after the first tokens of two held-out rows.

    Args:
        assembly: Plan, devices and data of the run.
        state: State with parameters and router state.
        length: Number of tokens to generate; a model that is not causal fills one row.
    """
    training, source = assembly.plan.config.training, assembly.source
    prompt_length = min(64, training.sequence_length)
    if not assembly.plan.model.attention.is_causal:
        # The model was trained on rows of this length only.
        prompt_length = training.sequence_length // 4
        length = training.sequence_length - prompt_length
    rows = [source.row("validation", row, prompt_length).tokens[:prompt_length] for row in (0, 1)]
    params = jax.device_get(state.params)
    router_state = jax.device_get(state.router_state)
    samples = continue_rows(
        assembly.plan.model, source, params, router_state, np.stack(rows), length, temperature=0.8
    )
    return "\n".join(map(str, samples))


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
) -> list[Sample]:
    """Continue prompts on one device.

    Args:
        model: Model of the parameters.
        source: Data source, which decodes tokens.
        params: Parameters on the host.
        router_state: Router state on the host.
        prompts: Token ids [rows, tokens].
        length: Number of tokens to generate.
        temperature: Divisor of the logits; 0 is greedy.
        seed: Seed of the sampling.
        execution: Execution of the model; defaults when None.
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
    return [
        Sample(prompt=source.decode(prompt), text=source.decode(row))
        for prompt, row in zip(prompts, np.asarray(written), strict=True)
    ]


def fill_after(
    model: ModelConfig, params: Any, prompt: jax.Array, *, num_tokens: int, **given: Any
) -> jax.Array:
    """Return what masked diffusion fills in after prompts of one length: [rows, num_tokens].

    Args:
        model: Model that is not causal.
        params: Parameters of the model.
        prompt: Token ids [rows, tokens].
        num_tokens: Number of tokens to fill in.
        **given: Further arguments of `diffuse`.
    """
    padding = ((0, 0), (0, num_tokens))
    is_given = jax.numpy.pad(jax.numpy.ones_like(prompt, bool), padding)
    tokens = jax.numpy.pad(prompt, padding)
    # With twice as many steps as tokens, two are seldom filled in at once.
    filled = diffuse(model, params, tokens, is_given, num_steps=2 * num_tokens, **given)
    return filled[:, prompt.shape[1] :]
