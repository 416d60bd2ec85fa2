# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes one step of serving: single tokens and pieces of prompts in one row.

    row         R tokens of R sequences, then P pieces of C tokens          T = R + P C
    layers      [1, T]: weights, those of experts above all, are read once for all of it
    attention   [R, 1] and [P, C] over pages (sharding/sequence_parallel/paged.py)
    head        the last token of each of the R + P sequences
    sampling    key fold_in(key(seed), i) for the i-th token of a request

The i-th key equals that of `jaxmoe.models.decode.generate` for a prompt alone, so that a request's
tokens do not depend on what else is served. There is one program for each shape of a step.

Source: dynamic split-fuse, DeepSpeed-FastGen (arXiv 2401.08671, section 3).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.models.sampling import Limits, choose_each
from jaxmoe.models.transformer import forward
from jaxmoe.routing.telemetry.recording import RECORDED, record_router
from jaxmoe.serve.device.draw import fill_rows, keys_of
from jaxmoe.serve.device.layers import stack_layers
from sharding.sequence_parallel import PageTables

Pools = dict[str, Any]
"""Pages [L P G ...] by path of the stack of layers; a page has the same number in all of them."""


class StepInputs(NamedTuple):
    """Tokens of a step and what is known of their sequences; N = R + P."""

    tokens: Int[Any, " T"]
    """Ids of the new tokens; anything for padding."""
    positions: Int[Any, " T"]
    """Position of each in its sequence; -1 for padding, which is neither routed nor written."""
    tables: PageTables
    last: Int[Any, " N"]
    """Place in the row of the last token of each sequence."""
    seeds: Int[Any, " N"]
    """Seed of each request."""
    indices: Int[Any, " N"]
    """Number of the token that each request is given, from 0: those it has been given before."""
    limits: Limits
    """Temperatures and filters [N]."""
    wants_top: Any
    """Whether a request wants the most likely tokens; they are 0 otherwise."""
    drawn: Int[Any, " M"]
    """Tokens that the step before has drawn; M is the largest N of the executor."""
    sources: Int[Any, " T"]
    """Place in them of each token that is taken from there; -1 for the others."""
    adapters: Int[Any, " T"] | None = None
    """Number of the adapter of each token, -1 for none; None where there are no adapters."""


class StepOutputs(NamedTuple):
    """What a step has computed for each of N = R + P sequences."""

    tokens: Int[Any, " M"]
    """Next token, 0 behind the N rows; meaningless where the last token of the sequence was not
    among those given."""
    logprobs: Float[Any, " N"]
    """Log-probability of it under the model, before temperature and filters."""
    top_ids: Int[Any, "N n"]
    """Most likely tokens, the first first."""
    top_logprobs: Float[Any, "N n"]
    """Their log-probabilities."""
    experts: Int[Any, "L T K"] | None
    """Experts of each token in each MoE layer, as counted by the router; None unless recorded."""
    load: Float[Any, "L E"] | None
    """Tokens that each expert has got; None for a dense model."""
    logits: Float[Any, "N V"] | None = None
    """Logits that the tokens were drawn from; they stay on the device, see `draw.py`."""
    last_hidden: Float[Any, "N D"] | None = None
    """Hidden states of the last tokens behind the final norm; they stay on the device."""
    hidden: Float[Any, "1 T D"] | None = None
    """Hidden states behind the final norm; they stay on the device, see `prompt.py`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """What a step returns beside tokens."""

    num_top: int = 0
    """Most likely tokens that are returned with their log-probabilities."""
    has_experts: bool = False
    """Whether the chosen experts of every token are returned."""


@functools.lru_cache(maxsize=16)
def make_step(
    model: ModelConfig, execution: ServedConfig, options: StepOptions
) -> Callable[[Any, Any, Pools, StepInputs], tuple[StepOutputs, Pools]]:
    """Return the jitted step `(params, router_state, pools, inputs) -> (outputs, pools)`.

    The pools are donated and written in place; those of what drafts stay as they are.

    Args:
        model: Config of the model.
        execution: How it is computed.
        options: What is returned beside tokens.
    """

    mixers: dict[str, Any] = {stack.path: stack.kind.mixer for stack in model.stacks}

    def step(
        params: Any, router_state: Any, pools: Pools, inputs: StepInputs
    ) -> tuple[StepOutputs, Pools]:
        watched = model
        params = stack_layers(params)
        tokens = jnp.where(
            inputs.sources >= 0, inputs.drawn[jnp.maximum(inputs.sources, 0)], inputs.tokens
        )
        if options.has_experts:
            watched = dataclasses.replace(model, moe=record_router(model.moe, len(inputs.tokens)))
        output = forward(
            watched,
            execution,
            params,
            tokens[None],
            positions=inputs.positions[None],
            token_mask=inputs.positions[None] >= 0,
            router_state=router_state,
            context={} if inputs.adapters is None else {"task": inputs.adapters[None]},
            cache={
                path: mixer.paged_cache(pools[path], inputs.tables)
                for path, mixer in mixers.items()
            },
            has_logits=False,
        )
        # Whole on every device, so that all of them draw the same tokens as one device.
        hidden = execution.placement.place(output.hidden, (None, None, None))
        rows = hidden[:, inputs.last]
        logits = output_logits(rows, head_weight(params, model), model, execution)
        logits = execution.placement.place(logits, (None, None, None))[0]
        outputs = _chosen(logits, inputs, options)
        outputs = outputs._replace(hidden=hidden, last_hidden=rows[0])
        if output.statistics is not None:
            outputs = outputs._replace(load=output.statistics.counts)
        if options.has_experts:
            assert output.statistics is not None  # `record_router` has refused a model without MoE
            outputs = outputs._replace(experts=output.statistics.extra[RECORDED] - 1)
        assert output.cache is not None  # given
        return outputs, pools | {path: cache.pool for path, cache in output.cache.items()}

    return jax.jit(step, donate_argnums=2)


def _chosen(logits: Array, inputs: StepInputs, options: StepOptions) -> StepOutputs:
    """Return the next tokens with their log-probabilities."""

    tokens = choose_each(logits, keys_of(inputs.seeds, inputs.indices), inputs.limits)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    token_logprobs = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    number = min(options.num_top, logits.shape[-1])
    none = (
        jnp.zeros((len(tokens), number), jnp.float32),
        jnp.zeros((len(tokens), number), jnp.int32),
    )
    top = none
    if number:
        top = jax.lax.cond(
            inputs.wants_top,
            lambda logprobs: tuple(jax.lax.top_k(logprobs, number)),
            lambda logprobs: none,
            logprobs,
        )
    drawn = fill_rows(tokens, len(inputs.drawn))
    return StepOutputs(drawn, token_logprobs, top[1], top[0], None, None, logits)
