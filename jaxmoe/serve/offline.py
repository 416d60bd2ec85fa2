# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers a list of prompts with an engine: for evaluation and samples, without a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxmoe.errors import JaxmoeError
from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text import GenerationConfig, LoadedModel, Sample, continue_texts
from jaxmoe.generation.text_stream import TextCodec
from jaxmoe.serve.answers import Ended, Generated, whole_experts
from jaxmoe.serve.backend import Executor, backend_of
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.engine import Engine, EngineConfig
from jaxmoe.serve.requests import EndReason, Sampling

_LENGTHS = 128
_MOST = 16
"""Multiple to which lengths are rounded up, and prompts that are continued at a time at most."""


class ServingError(JaxmoeError, RuntimeError):
    """A step failed while prompts were answered."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt and how it is answered."""

    tokens: tuple[int, ...]
    """Token ids; at least one."""
    sampling: Sampling = Sampling()
    """How the answer is drawn."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeAnswer:
    """The answer to a prompt."""

    tokens: tuple[int, ...]
    """Generated ids, a stop id included."""
    text: str
    """Their text, cut before a stop id or string; empty without a codec."""
    reason: EndReason
    """Why it ending."""
    experts: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """Experts [tokens L K] of prompt and answer, if asked for; see `answers.whole_experts`."""


def answer_all(
    executor: Executor,
    prompts: Iterable[Prompt],
    codec: TextCodec | None = None,
    config: InstancesConfig | None = None,
) -> list[WholeAnswer]:
    """Return the answers to prompts of any lengths, computed together.

    Args:
        executor: Computes the steps.
        prompts: Prompts.
        codec: Decoder of tokens; None gives no text.
        config: What an instance computes; `EngineConfig` when None. All prompts may wait.

    Raises:
        ServingError: A prompt is too long, or a step failed.
    """
    requests = list(prompts)
    config = dataclasses.replace(config or EngineConfig(), max_waiting=max(len(requests), 1))
    with Engine(executor, config, codec=codec) as engine:
        streams = [
            engine.submit(prompt.tokens, prompt.sampling, stop=prompt.stop) for prompt in requests
        ]
        return [_whole(list[Any](stream)) for stream in streams]


def continue_together(
    model: LoadedModel,
    codec: TextCodec,
    prompts: Sequence[Sequence[int] | np.ndarray],
    generation: GenerationConfig,
    *,
    precision: str = "",
) -> list[Sample]:
    """Continue prompts of any lengths, each as if it were alone, with the seeds seed, seed + 1, ...

    A prompt that ends makes room for the next. Models that the engine does not serve are continued
    by `continue_texts`, with one key for all prompts.

    Args:
        model: Model with parameters on one device, and how it is computed.
        codec: Decoder of tokens.
        prompts: Token ids of each prompt.
        generation: Length, sampling and ends.
        precision: Formats of weights and cache, for the samples.
    """
    execution = model.execution or ExecutionConfig()
    longest = max(len(prompt) for prompt in prompts) + generation.length
    length = -(-longest // _LENGTHS) * _LENGTHS
    rows = min(1 << (len(prompts) - 1).bit_length(), _MOST)
    backend = backend_of(model.config)
    if backend.refusal(model.config, execution) is not None:
        return continue_texts(model, codec, prompts, generation, precision=precision)
    sizes = backend.sizes_for(max_length=length, batch_size=rows)
    executor = backend.executor(
        model.config,
        model.params,
        model.router_state or None,
        sizes=sizes,
        execution=execution,
    )
    requests = [
        Prompt(
            tokens=tuple(map(int, prompt)),
            sampling=_sampling(generation, row, model.config.vocab_size),
            stop=generation.stop,
        )
        for row, prompt in enumerate(prompts)
    ]
    answers = answer_all(executor, requests, codec, backend.config())
    return [
        Sample(
            prompt=codec.decode(np.asarray(prompt, np.int32)),
            text=answer.text,
            precision=precision,
            token_ids=tuple(token for token in answer.tokens if token not in generation.eos_ids),
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _sampling(config: GenerationConfig, row: int, vocab_size: int) -> Sampling:
    """Return how one of several prompts is continued; ids that no model draws end nothing."""
    sampling = config.sampling
    return Sampling(
        max_tokens=config.length,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p or 0.0,
        seed=(config.seed + row) % 2**31,
        stop_ids=tuple(token for token in config.eos_ids if token < vocab_size),
    )


def _whole(events: Sequence[Generated | Ended]) -> WholeAnswer:
    ending = events[-1]
    assert isinstance(ending, Ended)  # every stream has one
    if ending.message:
        raise ServingError(ending.message)
    generated = [event for event in events if isinstance(event, Generated)]
    return WholeAnswer(
        tokens=tuple(event.token for event in generated),
        text="".join(event.text for event in events),
        reason=ending.reason,
        experts=whole_experts(events),
    )
