# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Continues texts: encodes prompts, generates, cuts at stop strings, streams what is certain."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxmoe import catalog
from jaxmoe.data import DataError, Source
from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text_stream import TextCodec, TextStream
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import MakePrograms, stream
from jaxmoe.models.sampling import SamplingConfig

_AT_ONCE = 8
"""Tokens between two looks for stop strings, and two pieces of a stream."""
_MOST_TOKENS = 2**30
"""Largest length: positions are 32-bit integers, and lengths are rounded up."""


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
        if self.length > _MOST_TOKENS:
            raise ValueError(f"length={self.length} tokens are too many: at most {_MOST_TOKENS}")
        if not all(self.stop):
            raise ValueError("stop holds an empty string, which every text contains: leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModel:
    """A model with its parameters, and how it is computed."""

    config: ModelConfig
    """Model of the parameters."""
    params: Any
    """Parameters of the model."""
    router_state: Any = None
    """Router state."""
    execution: ExecutionConfig | None = None
    """Execution of the model; defaults when None."""
    programs: MakePrograms | None = None
    """Makes the programs, see `jaxmoe.models.decode.stream`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WriterConfig(abc.ABC):
    """How the models of one kind write the tokens after prompts."""

    name: ClassVar[str]

    @abc.abstractmethod
    def fits(self, model: ModelConfig) -> bool:
        """Return whether models like this one write so.

        Args:
            model: Config of the model.
        """

    @abc.abstractmethod
    def write(
        self,
        model: LoadedModel,
        prompts: Sequence[Sequence[int] | np.ndarray],
        config: GenerationConfig,
        *,
        at_once: int,
    ) -> Iterable[Iterable[np.ndarray]]:
        """Return the next tokens of every prompt, part by part.

        Args:
            model: Model, and how it is computed.
            prompts: Token ids of each prompt.
            config: Length, sampling and ends.
            at_once: Tokens of a part, where the model writes them one after the other.

        Raises:
            ValueError: The model does not write such prompts, or has no use for `programs`.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeftToRightConfig(WriterConfig):
    """One token after the other, with a cache."""

    name: ClassVar[str] = "left_to_right"

    def fits(self, model: ModelConfig) -> bool:
        """Return whether the model is causal."""
        return model.attention.is_causal

    def write(
        self,
        model: LoadedModel,
        prompts: Sequence[Sequence[int] | np.ndarray],
        config: GenerationConfig,
        *,
        at_once: int,
    ) -> Iterable[Iterable[np.ndarray]]:
        """Return the tokens as they are drawn."""
        return stream(
            model.config,
            model.params,
            list(prompts),
            num_tokens=config.length,
            key=jax.random.key(config.seed),
            sampling=config.sampling,
            eos_ids=config.eos_ids,
            at_once=at_once,
            router_state=model.router_state,
            execution=model.execution,
            programs=model.programs,
        )


def writer_of(model: ModelConfig) -> WriterConfig:
    """Return how a model writes: the first writer of the catalogue that fits it.

    Args:
        model: Config of the model.

    Raises:
        ValueError: None does.
    """
    for name in catalog.names("writer"):
        writer: WriterConfig = catalog.choice("writer", name)()
        if writer.fits(model):
            return writer
    raise ValueError(
        f"model.attention.is_causal={model.attention.is_causal}: no writer of the catalogue"
        f" ({', '.join(catalog.names('writer'))}) continues such a model: add one to the catalogue"
    )


def separator_of(source: Source) -> int | None:
    """Return the id between the documents of a source; None if it is not text.

    Args:
        source: Data of a run.
    """
    tokenizer = getattr(source, "tokenizer", None)
    if tokenizer is not None:
        return tokenizer.separator if tokenizer.is_text else None
    return 0 if source.bytes_per_token == 1.0 else None


def encode_prompts(codec: TextCodec, prompts: Sequence[str]) -> list[np.ndarray]:
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
    model: LoadedModel,
    codec: TextCodec,
    prompts: Sequence[Sequence[int] | np.ndarray],
    config: GenerationConfig,
    *,
    on_sample: OnSample | None = None,
    precision: str = "",
) -> list[Sample]:
    """Continue prompts of any lengths together.

    Args:
        model: Model, and how it is computed.
        codec: Decoder of tokens.
        prompts: Token ids of each prompt.
        config: Length, sampling and ends.
        on_sample: Called with the only sample as it grows; text that may still change, or begins a
            stop string, is held back.
        precision: Formats of weights and cache, for the samples.

    Raises:
        ValueError: Several prompts are streamed, or the model's writer refuses them.
    """
    if on_sample is not None and len(prompts) > 1:
        raise ValueError(f"{len(prompts)} prompts cannot be streamed together: stream one")
    texts = [_Text(codec, config, prompt, precision, on_sample) for prompt in prompts]
    at_once = _AT_ONCE if on_sample or config.stop else config.length
    parts = writer_of(model.config).write(model, prompts, config, at_once=at_once)
    for part in parts:
        for text, tokens in zip(texts, part, strict=True):
            text.add(tokens)
        if all(text.is_done for text in texts):
            break
    return [text.finish() for text in texts]


class _Text:
    """One continuation, as its tokens arrive."""

    def __init__(
        self,
        codec: TextCodec,
        config: GenerationConfig,
        prompt: Sequence[int] | np.ndarray,
        precision: str,
        on_sample: OnSample | None,
    ):
        self._eos_ids = config.eos_ids
        self._on_sample = on_sample
        self._stream = TextStream(codec, config.stop, prompt)
        self._sample = Sample(
            prompt=codec.decode(np.asarray(prompt, np.int32)), text="", precision=precision
        )
        self._tokens: list[int] = []
        self.is_done = False

    def add(self, tokens: np.ndarray) -> None:
        """Take further tokens, unless the text has ended."""
        text = ""
        for token in [] if self.is_done else tokens.tolist():
            if token in self._eos_ids:
                self.is_done = True
                break
            self._tokens.append(token)
            text += self._stream.add(token)
        self.is_done = self.is_done or self._stream.is_stopped
        if text:
            self._sample = dataclasses.replace(self._sample, text=self._sample.text + text)
            if self._on_sample is not None and not self.is_done:
                self._on_sample(self._sample)

    def finish(self) -> Sample:
        """Return the sample, cut before a stop string."""
        text = self._sample.text + self._stream.finish()
        return dataclasses.replace(self._sample, text=text, token_ids=tuple(self._tokens))
