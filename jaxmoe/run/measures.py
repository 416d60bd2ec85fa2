# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a trained run on held-out tokens: statistics of routers, a trace, readings of the cache.

A routing trace is of the
forward pass of an evaluation on the current mesh, until there are `MOST_TOKENS` tokens; the file
format is in `jaxmoe/routing/telemetry/trace.py`. For `--cache_pages` decoded tokens are
measured with a part of the cache and with all of it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxmoe.catalog import choice, names
from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.cache import bytes_read, num_slots
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import cache_length
from jaxmoe.models.transformer import forward
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing.telemetry.recording import record_router, recorded_ids
from jaxmoe.routing.telemetry.trace import RoutingTrace
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.load import describe_precision
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.measures.decoded_loss import DecodedLoss, compare_readings
from jaxmoe.training.pipeline import pipeline_forward
from jaxmoe.training.state import TrainState
from sharding.sequence_parallel import WHOLE_CACHE, CacheReading


@functools.partial(jax.jit, static_argnums=(0, 1))
def router_statistics(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    router_state: Any,
    batch: Batch,
    domain: Int32[Array, "B S"] | None = None,
) -> Any:
    """Return the statistics of all MoE layers; None for a dense model.

    Args:
        model: Trained model.
        execution: Execution of the model.
        params: Parameters of the model.
        router_state: Router state, stacked over MoE layers.
        batch: Batch without masked tokens.
        domain: Domain of each token, for detailed telemetry; None without domains.
    """
    tokens = jnp.asarray(batch.tokens)
    # Nothing is masked; some capacity schedules follow this ratio.
    context: dict[str, Array] = {"mask_ratio": jnp.zeros(tokens.shape, jnp.float32)}
    if domain is not None:
        context["domain"] = domain
    if execution.mesh.stage > 1:
        _, statistics = pipeline_forward(
            params,
            router_state,
            dataclasses.replace(batch, mask_ratio=None),
            model=model,
            execution=execution,
            objective=NextTokenConfig(),
            context=context,
        )
        return statistics
    output = forward(
        model,
        execution,
        params,
        tokens,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        router_state=router_state,
        context=context,
        has_logits=False,
    )
    return output.statistics


class Details(abc.ABC):
    """Base class of the rows about routers, or about the feed-forward of the same name."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name of the feed-forward, or `routers`."""

    @abc.abstractmethod
    def rows(self, assembly: Assembly, state: TrainState) -> list[dict[str, Any]]:
        """Return what is measured on held-out batches, one row a line of the table.

        Args:
            assembly: Plan, devices and data of the run; its mesh is current.
            state: State with parameters.
        """


def details_of(model: ModelConfig) -> Details:
    """Return what is measured of the routers of a model, for `evaluate --routing detailed`.

    Args:
        model: A model with a feed-forward that has rows of its own has these instead.

    Raises:
        ValueError: The catalogue has none.
    """
    layer_names = (
        layer.name for layer in model.context.feed_forwards if layer.name in names("details")
    )
    return choice("details", next(layer_names, "routers"))()


MOST_TOKENS = 65_536


def record_trace(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    router_state: Any,
    batches: Iterable[Batch],
    *,
    most_tokens: int = MOST_TOKENS,
) -> RoutingTrace:
    """Record the experts of the real tokens of some batches.

    Args:
        model: Trained model.
        execution: Execution of the model.
        params: Parameters of the model.
        router_state: Router state, stacked over MoE layers.
        batches: Batches of one shape without masked tokens.
        most_tokens: Number of tokens after which no further batch is read.

    Raises:
        ValueError: The model has no MoE layer, or a router in which tokens do not choose.
    """
    moe = model.moe
    if moe is None or not model.num_moe_layers:
        raise ValueError("the model has no MoE layer: there is no routing to record")
    token_ids = []
    expert_ids = []
    for batch in batches:
        tokens = np.asarray(batch.tokens)
        watched = dataclasses.replace(model, moe=record_router(moe, tokens.size))
        statistics = router_statistics(watched, execution, params, router_state, batch)
        chosen = recorded_ids(jax.device_get(statistics))
        is_real = np.ones(tokens.size, bool)
        if batch.segment_ids is not None:
            is_real = np.asarray(batch.segment_ids).ravel() != 0
        token_ids.append(tokens.ravel()[is_real])
        # Experts without computation are on every device and are not dispatched.
        expert_ids.append(np.minimum(chosen[:, is_real], moe.num_experts))
        if sum(map(len, token_ids)) >= most_tokens:
            break
    ids = np.concatenate(expert_ids, axis=1)[:, :most_tokens]
    return RoutingTrace(np.concatenate(token_ids)[:most_tokens], ids, moe.num_experts)


def record_run(assembly: Assembly, state: TrainState) -> RoutingTrace:
    """Record the experts of the held-out tokens of a run, on its mesh.

    Args:
        assembly: Run with its data.
        state: State of a checkpoint.
    """
    with jax.set_mesh(assembly.mesh):
        return record_trace(
            assembly.plan.model,
            assembly.execution,
            state.params,
            state.router_state,
            assembly.held_out(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadingResult:
    """Held-out loss of decoded tokens with a selection of the cache and with all of it."""

    step: int
    """Step of the checkpoint."""
    loss: DecodedLoss
    """Loss with the selection and without."""
    tokens_per_byte: float | None
    """Tokens of a byte of text; None for data without bytes."""
    description: str
    """Pages and bytes that a token reads."""

    def __str__(self) -> str:
        """Return the result as one line of names and values."""
        parts = [self.description, f"decoded_tokens={self.loss.selected.num_tokens}"]
        for name, part in (("selected", self.loss.selected), ("whole", self.loss.complete)):
            parts.append(f"{name}/bits_per_token={part.bits_per_token!r}")
            if self.tokens_per_byte is not None:
                bits = part.bits_per_token * self.tokens_per_byte
                parts.append(f"{name}/bits_per_byte={bits!r}")
        return " ".join(parts)


def measure_reading(
    assembly: Assembly, state: TrainState, step: int, reading: CacheReading
) -> ReadingResult:
    """Return the loss of the second halves of the held-out rows, decoded.

    Args:
        assembly: Plan, devices and data of the run; its mesh is current.
        state: State with parameters and router state.
        step: Step of the checkpoint.
        reading: Part of the cache that is read.
    """
    model = assembly.plan.model
    execution = assembly.execution
    loss = compare_readings(
        model,
        state.params,
        state.router_state,
        assembly.held_out(),
        execution=execution,
        reading=reading,
    )
    length = assembly.plan.config.training.sequence_length
    per_token = assembly.source.bytes_per_token
    return ReadingResult(
        step=step,
        loss=loss,
        tokens_per_byte=None if per_token is None else 1.0 / per_token,
        description=_describe(model, WholeRowsConfig.of(execution, reading), length),
    )


def decoding(
    assembly: Assembly, reading: CacheReading, prompts: Sequence[np.ndarray], num_tokens: int
) -> tuple[WholeRowsConfig, str]:
    """Return the execution of `Run.generate`, on one device, and its precision and pages as text.

    Args:
        assembly: Run with the formats of weights and cache.
        reading: Part of the cache that is read.
        prompts: Tokens of each prompt.
        num_tokens: Tokens to generate.
    """
    precision = assembly.execution.precision
    policy = PrecisionPolicy(weights=precision.weights, cache=precision.cache)
    execution = WholeRowsConfig.of(ExecutionConfig(precision=policy), reading)
    length = cache_length(max(map(len, prompts)), num_tokens)
    description = describe_precision(assembly), _describe(assembly.plan.model, execution, length)
    return execution, " ".join(word for word in description if word)


def _describe(model: ModelConfig, execution: WholeRowsConfig, length: int) -> str:
    """Return the pages and bytes that a generated token reads as text; empty for the whole cache.

    Args:
        model: Layers that have a cache.
        execution: Part of the cache that is read.
        length: Positions that the cache can hold at least.
    """
    reading = execution.cache_reading
    if not reading.selects:
        return ""
    slots = num_slots(execution, length)
    cache_bytes, full_bytes = (
        bytes_read(model, WholeRowsConfig.of(execution, each), slots)
        for each in (reading, WHOLE_CACHE)
    )
    return f"reading={reading.describe(slots)} bytes_read={cache_bytes} of {full_bytes}"
