# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures and describes the selection of pages of a cache, for `--cache_pages`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.cache import bytes_read, num_slots
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import cache_length
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.load import describe_precision
from jaxmoe.training.measures.decoded_loss import DecodedLoss, compare_readings
from jaxmoe.training.state import TrainState
from sharding.sequence_parallel import WHOLE_CACHE, CacheReading


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
        words = [self.description, f"decoded_tokens={self.loss.selected.num_tokens}"]
        for name, part in (("selected", self.loss.selected), ("whole", self.loss.whole)):
            words.append(f"{name}/bits_per_token={part.bits_per_token!r}")
            if self.tokens_per_byte is not None:
                bits = part.bits_per_token * self.tokens_per_byte
                words.append(f"{name}/bits_per_byte={bits!r}")
        return " ".join(words)


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
    model, execution = assembly.plan.model, assembly.execution
    loss = compare_readings(
        *(model, state.params, state.router_state, assembly.held_out()),
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
    own = PrecisionPolicy(weights=precision.weights, cache=precision.cache)
    execution = WholeRowsConfig.of(ExecutionConfig(precision=own), reading)
    length = cache_length(max(map(len, prompts)), num_tokens)
    words = describe_precision(assembly), _describe(assembly.plan.model, execution, length)
    return execution, " ".join(word for word in words if word)


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
    taken, whole = (
        bytes_read(model, WholeRowsConfig.of(execution, each), slots)
        for each in (reading, WHOLE_CACHE)
    )
    return f"reading={reading.describe(slots)} bytes_read={taken} of {whole}"
