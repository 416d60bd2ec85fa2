# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Continues texts: encodes prompts, generates, cuts at stop strings, streams what is certain."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxmoe.data import DataError, Source
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import MakePrograms, stream
from jaxmoe.models.diffuse import diffuse
from jaxmoe.models.sampling import SamplingConfig

_AT_ONCE = 8
"""Tokens between two looks for stop strings, and two pieces of a stream."""
STEPS_PER_TOKEN = 2.0
"""Steps of masked diffusion for each token: two tokens are seldom filled in at once then."""
_CONTEXT = 8
"""Tokens of a prompt that its continuation is decoded behind: more than a character has, and than
marks without text stand side by side."""
_BROKEN = "\ufffd"
"""Replacement of bytes that are not UTF-8, such as the first ones of a character."""


@runtime_checkable
class Codec(Protocol):
    """What a `jaxmoe.data.Source` has for text."""

    def encode(self, text: str) -> Any:
        """Return the token ids of a prompt."""
        ...

    def decode(self, tokens: Any) -> str:
        """Return the text of token ids."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt and the text that a model generated after it."""

    prompt: str
    text: str
    """What the tokens add to the text of the prompt, a first space included; cut before a stop
    string or the end of text."""
    precision: str = ""
    """Formats of quantised weights and cache; empty without any."""
    token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Generated ids, up to the end of text."""

    def __str__(self) -> str:
        return f"{self.head}{self.text}\n"

    @property
    def head(self) -> str:
        """Lines before the continuation."""
        return f"--- prompt\n{self.prompt}\n--- continued\n"


OnSample = Callable[[Sample], None]
"""Called with the sample so far, whose text only grows."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """Length, sampling and ends of generated texts."""

    length: int = 300
    """Largest number of tokens to generate."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.8)
    """Temperature and filters."""
    seed: int = 0
    """Seed of the sampling."""
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a text."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which is cut before them."""

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length={self.length} must be at least 1")
        if not all(self.stop):
            raise ValueError("stop holds an empty string, which every text contains: leave it out")


def separator_of(source: Source) -> int | None:
    """Return the id between the documents of a source; None if it is not text.

    Args:
        source: Data of a run.
    """
    tokenizer = getattr(source, "tokenizer", None)
    if tokenizer is not None:
        return tokenizer.separator if tokenizer.is_text else None
    return 0 if source.bytes_per_token == 1.0 else None


def encode_prompts(codec: Codec, prompts: Sequence[str]) -> list[np.ndarray]:
    """Return the token ids of prompts.

    Args:
        codec: Encoder of the text.
        prompts: Texts to continue.

    Raises:
        ValueError: A prompt is empty or cannot be encoded.
    """
    rows = []
    for prompt in prompts:
        if not prompt:
            raise ValueError("prompt is empty: give at least one character")
        try:
            row = np.asarray(codec.encode(prompt), np.int32)
        except DataError as error:
            raise ValueError(f"prompt={prompt!r}: {error}") from error
        if not len(row):
            raise ValueError(f"prompt={prompt!r} has no token: give more text")
        rows.append(row)
    if not rows:
        raise ValueError("there is no prompt: give at least one text")
    return rows


def continue_texts(
    model: ModelConfig,
    codec: Codec,
    params: Any,
    router_state: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    config: GenerationConfig,
    *,
    execution: ExecutionConfig | None = None,
    on_sample: OnSample | None = None,
    precision: str = "",
    programs: MakePrograms | None = None,
) -> list[Sample]:
    """Continue prompts of any lengths together.

    Args:
        model: Model of the parameters.
        codec: Decoder of tokens.
        params: Parameters of the model.
        router_state: Router state.
        prompts: Token ids of each prompt.
        config: Length, sampling and ends.
        execution: Execution of the model; defaults when None.
        on_sample: Called with the only sample as it grows; text that may still change, or begins a
            stop string, is held back.
        precision: Formats of weights and cache, for the samples.
        programs: Makes the programs, see `jaxmoe.models.decode.stream`.

    Raises:
        ValueError: Several prompts are streamed, or `programs` or prompts of several lengths are
            given to a model that is not causal.
    """
    if on_sample is not None and len(prompts) > 1:
        raise ValueError(f"{len(prompts)} prompts cannot be streamed together: stream one")
    texts = [_Text(codec, config, prompt, precision, on_sample) for prompt in prompts]
    shared: dict[str, Any] = {
        "num_tokens": config.length,
        "key": jax.random.key(config.seed),
        "router_state": router_state,
        "execution": execution,
    }
    if model.attention.is_causal:
        looks = bool(on_sample or config.stop)
        parts = stream(
            *(model, params, list(prompts)),
            sampling=config.sampling,
            eos_ids=config.eos_ids,
            at_once=_AT_ONCE if looks else config.length,
            programs=programs,
            **shared,
        )
    elif programs is not None:
        raise ValueError(
            "model.attention.is_causal=False: this model has no cache, and is computed whole: leave"
            " --layers and --experts out"
        )
    else:
        parts = iter([_fill_after(model, params, prompts, config, shared)])
    for part in parts:
        for text, tokens in zip(texts, part, strict=True):
            text.add(tokens)
        if all(text.is_done for text in texts):
            break
    return [text.finished() for text in texts]


def context_of(prompt: Sequence[int] | np.ndarray) -> list[int]:
    """Return the last tokens of a prompt, behind which its continuation is decoded.

    Decoders treat the first token of a text apart: those of SentencePiece leave out its space.

    Args:
        prompt: Token ids.
    """
    return [int(token) for token in prompt[-_CONTEXT:]]


def added_text(before: str, text: str) -> str:
    """Return what a text has beyond an earlier state of it, whose last character may have grown.

    Args:
        before: Text of the first tokens.
        text: Text of these and further tokens.
    """
    return text[len(os.path.commonprefix([before, text])) :]


class _Text:
    """One continuation, as its tokens arrive."""

    def __init__(
        self,
        codec: Codec,
        config: GenerationConfig,
        prompt: Sequence[int] | np.ndarray,
        precision: str,
        on_sample: OnSample | None,
    ):
        self._codec, self._given, self._on_sample = codec, config, on_sample
        self._context = context_of(prompt)
        self._before = codec.decode(np.asarray(self._context, np.int32))
        self._sample = Sample(
            prompt=codec.decode(np.asarray(prompt, np.int32)), text="", precision=precision
        )
        self._tokens: list[int] = []
        self.is_done = False

    def add(self, tokens: np.ndarray) -> None:
        """Take further tokens, unless the text has ended."""
        for token in tokens.tolist():
            if self.is_done:
                return
            self.is_done = token in self._given.eos_ids
            if not self.is_done:
                self._tokens.append(token)
        if not self._given.stop and self._on_sample is None:
            return
        text = self._decoded()
        cut = first_stop(text, self._given.stop)
        self.is_done = self.is_done or cut < len(text)
        if self._on_sample is not None and not self.is_done:
            text = text[: certain_length(text, self._given.stop)]
            if len(text) > len(self._sample.text):
                self._sample = dataclasses.replace(self._sample, text=text)
                self._on_sample(self._sample)

    def finished(self) -> Sample:
        """Return the sample, cut before a stop string."""
        text = self._decoded()
        text = text[: first_stop(text, self._given.stop)]
        return dataclasses.replace(self._sample, text=text, token_ids=tuple(self._tokens))

    def _decoded(self) -> str:
        tokens = np.asarray(self._context + self._tokens, np.int32)
        return added_text(self._before, self._codec.decode(tokens))


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Return the index of the first stop string in a text; its length without any.

    Args:
        text: Generated text.
        stop: Strings that end it.
    """
    places = (text.find(end) for end in stop)
    return min((index for index in places if index >= 0), default=len(text))


def certain_length(text: str, stop: Sequence[str]) -> int:
    """Return the length of a text that further tokens do not change.

    Args:
        text: Generated text so far.
        stop: Strings that end it; a beginning of one may become one.
    """
    num_whole = len(text.rstrip(_BROKEN))
    for end in stop:
        for size in range(min(len(end) - 1, len(text)), 0, -1):
            if text.endswith(end[:size]):
                num_whole = min(num_whole, len(text) - size)
                break
    return num_whole


def _fill_after(
    model: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    config: GenerationConfig,
    shared: dict[str, Any],
) -> np.ndarray:
    """Return what masked diffusion fills in after prompts of one length: [rows, length]."""
    if len({len(prompt) for prompt in prompts}) > 1:
        raise ValueError(
            "model.attention.is_causal=False: this model continues prompts of one length together,"
            " and these have several: give them one at a time"
        )
    rows, num_tokens = np.stack(prompts), config.length
    padding = ((0, 0), (0, num_tokens))
    seeds = [(config.seed + row) % 2**31 for row in range(len(rows))]
    filled = diffuse(
        *(model, params, jax.numpy.asarray(np.pad(rows, padding))),
        jax.numpy.asarray(np.pad(np.ones_like(rows, bool), padding)),
        num_steps=math.ceil(STEPS_PER_TOKEN * num_tokens),
        keys=jax.vmap(jax.random.key)(np.asarray(seeds, np.int32)),
        sampling=config.sampling,
        router_state=shared["router_state"],
        execution=shared["execution"],
    )
    return np.asarray(filled)[:, rows.shape[1] :]
