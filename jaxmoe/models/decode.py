# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates tokens with a cache: the prompts in one pass, then one token at a time.

Prompts of unequal length are padded on the right. Padding is neither attended to nor routed: the
next token of a row takes the slot after its prompt. Lengths are rounded up to a few sizes (32, 48,
64, 96, 128, ...), so that a new prompt, another number of tokens, or another value of a filter
compiles nothing.

On a mesh every device that shares a row (seq, tensor) computes all its new tokens and holds a part
of the cache: the slots are cut over `seq`, the heads over `tensor`. The tokens equal those of one
device. A prompt is therefore computed `seq` times, except its attention, and experts are gathered
to the tokens with any dispatcher.

`WholeRowsConfig.reading` may select pages of the cache that a generated token reads.

Weights (`jaxmoe.models.quantize`) and the cache (`execution.precision.cache`) may be quantised on
any mesh.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.cache import Cache, check_reading, initial_cache
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.sampling import Limits, SamplingConfig, choose
from jaxmoe.models.transformer import forward
from sharding import axes as ax

_SHORTEST = 32
_AT_ONCE = 64
"""Most tokens that the program generates between two looks of the host."""

Prompts = Int[Array, "..."] | Int[np.ndarray, "..."] | Sequence[Any]
"""Token ids [B, S], or a list of rows of any lengths."""


def generate(
    model: ModelConfig,
    params: Any,
    prompt: Prompts,
    *,
    num_tokens: int,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_ids: Sequence[int] = (),
    router_state: Any = None,
    execution: ExecutionConfig | None = None,
) -> Int[Array, "B num_tokens"]:
    """Continue prompts.

    Args:
        model: Config of the model.
        params: Its parameters, on one device or laid out on the current mesh.
        prompt: Tokens, at least one per row; an array, or a list of prompts of any lengths.
        num_tokens: Number of tokens to generate.
        key: PRNG key of the sampling.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to choose from; all when None.
        top_p: Probability that the most likely tokens to choose from have together.
        min_p: Smallest probability to choose from, divided by the largest.
        eos_ids: Tokens that end a row; the rest of it repeats the first of them.
        router_state: State of the routers, stacked over MoE layers; fresh when None.
        execution: How the model is computed.

    Returns:
        The generated tokens.

    Raises:
        ValueError: An empty prompt or one with ids outside the vocabulary, num_tokens below 1, a
            value of the sampling out of range, or a model that is not causal.
    """
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    parts = stream(
        model,
        params,
        prompt,
        num_tokens=num_tokens,
        key=key,
        sampling=sampling,
        eos_ids=eos_ids,
        router_state=router_state,
        execution=execution,
        at_once=_AT_ONCE,
    )
    written = np.concatenate([*parts], axis=1)
    missing = num_tokens - written.shape[1]
    fill = eos_ids[0] if missing else 0
    return jax.device_put(np.pad(written, ((0, 0), (0, missing)), constant_values=fill))


def stream(
    model: ModelConfig,
    params: Any,
    prompt: Prompts,
    *,
    num_tokens: int,
    key: Key[Array, ""],
    sampling: SamplingConfig,
    eos_ids: Sequence[int] = (),
    router_state: Any = None,
    execution: ExecutionConfig | None = None,
    at_once: int = 1,
    programs: MakePrograms | None = None,
) -> Iterator[Int[np.ndarray, "B n"]]:
    """Yield the tokens of `generate` as they are computed, and end when all rows have ended.

    Args:
        model: Config of the model.
        params: Its parameters, on one device or laid out on the current mesh.
        prompt: Tokens, as for `generate`.
        num_tokens: Number of tokens to generate.
        key: PRNG key of the sampling.
        sampling: Temperature and filters.
        eos_ids: Tokens that end a row; the rest of it repeats the first of them.
        router_state: State of the routers, stacked over MoE layers; fresh when None.
        execution: How the model is computed.
        at_once: Tokens of one part, at most 64; the first part has one.
        programs: Makes the programs, such as `HostPrograms`; the whole model in one when None.

    Raises:
        ValueError: As `generate`; raised before the first part.
    """
    if not model.attention.is_causal:
        raise ValueError(
            "model.attention.is_causal=False: this model fills gaps from both sides, and cannot"
            " write from left to right: sample it with jaxmoe.contrib.diffusion.diffuse"
        )
    rows = _rows(prompt, model.vocab_size)
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: generation needs a token to generate")
    execution = WholeRowsConfig.of(execution or ExecutionConfig())
    check_reading(model, execution)
    if execution.placement.mesh_axes(ax.ACT_BATCH):
        sizes = jax.sharding.get_abstract_mesh().shape
        axes = (ax.ACT_BATCH, None)
        execution.axis_rules.check_divides("prompt", (len(rows), len(rows[0])), axes, sizes)
    make = programs or _compile_programs

    def parts() -> Iterator[np.ndarray]:
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((len(rows), _round_to(int(lengths.max()))), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        capacity = cache_length(int(lengths.max()), num_tokens)
        compiled = make(
            ProgramShape(
                model=model,
                execution=execution,
                capacity=capacity,
                is_greedy=sampling.is_greedy,
                has_filters=sampling.has_filters,
            )
        )
        limits = sampling.limits(model.vocab_size)
        keys = jax.random.split(key, _round_to(num_tokens))
        ends = np.asarray(eos_ids, np.int32)
        inputs = DecodeInputs(params, router_state, keys, limits, ends)
        state = compiled.read(inputs, tokens, lengths)
        yield np.asarray(state.token)[:, None]
        done = 1
        while done < num_tokens and not (len(ends) and np.asarray(state.is_done).all()):
            count = min(at_once, _AT_ONCE, num_tokens - done)
            state, written = compiled.write(inputs, state, np.int32(done), np.int32(count))
            yield np.asarray(written)[:, :count]
            done += count

    return parts()


class DecodeInputs(NamedTuple):
    """What all calls of the programs of one generation read."""

    params: Any
    router_state: Any
    """State of the routers, stacked over MoE layers; fresh when None."""
    keys: Array
    """PRNG key of each token."""
    limits: Limits
    """Numbers of the sampling."""
    ends: Any
    """Tokens that end a row."""


class DecodeState(NamedTuple):
    """Rows between two calls of the program."""

    token: Int[Array, " B"]
    """Latest token, which the cache lacks."""
    length: Int[Array, " B"]
    """Number of tokens in the cache, the position of `token`."""
    is_done: Array
    """Whether the row has ended [B]."""
    cache: Cache


class Programs(NamedTuple):
    """Functions of one model and cache size."""

    read: Callable[..., Any]
    """Reads prompts and chooses the first tokens."""
    write: Callable[..., Any]
    """Chooses up to `_AT_ONCE` further tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramShape:
    """What programs are compiled for: one model, cache size and kind of sampling."""

    model: ModelConfig
    """Layers."""
    execution: ExecutionConfig
    """How they are computed."""
    capacity: int
    """Slots of the cache."""
    is_greedy: bool
    """Whether the likeliest token is chosen."""
    has_filters: bool
    """Whether unlikely tokens are left out."""

    def choose(self, logits: Array, key: Array, limits: Limits) -> Array:
        """Return the next token of each row; see `jaxmoe.models.sampling.choose`.

        Args:
            logits: Logits of the next token [B V].
            key: PRNG key of this token.
            limits: Temperature and filters.
        """
        return choose(logits, key, limits, is_greedy=self.is_greedy, has_filters=self.has_filters)


MakePrograms = Callable[[ProgramShape], Programs]
"""Function that returns the programs for a shape."""


class HostPrograms(abc.ABC):
    """Makes the programs of `stream` in a form of its own: for parameters in host memory, or with
    drafts.

    `str` says what was moved, or drafted.
    """

    @abc.abstractmethod
    def __call__(self, shape: ProgramShape) -> Programs:
        """Return the programs of a generation.

        Args:
            shape: Model, cache size and kind of sampling.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the threads of the last generation, and free what it has on the device."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostParametersConfig(abc.ABC):
    """Base class of the kind `host_parameters`: what is on the device while a model generates."""

    name: ClassVar[str]
    """Name in the catalogue, with which the text of a flag begins."""

    @classmethod
    @abc.abstractmethod
    def parse(cls, text: str) -> HostParametersConfig:
        """Return the config that the text of a flag describes.

        Args:
            text: Name and size, such as window:4.

        Raises:
            ValueError: The text describes none; it says what to write.
        """

    @abc.abstractmethod
    def build(self) -> HostPrograms:
        """Return the programs of one generation after the other."""


@functools.lru_cache(maxsize=16)
def _compile_programs(shape: ProgramShape) -> Programs:
    """Return the jitted programs for one model, cache size and kind of sampling."""
    model = shape.model
    execution = shape.execution

    def logits_of(
        params: Any, tokens: Array, cache: Cache, router_state: Any, **options: Any
    ) -> Any:
        output = forward(
            model, execution, params, tokens, router_state=router_state, cache=cache, **options
        )
        assert output.logits is not None  # asked for by default
        return output.logits, output.cache

    def whole(logits: Array) -> Array:
        # Whole on every device, so that all of them draw the same tokens as one device.
        return execution.placement.place(logits, (None, None))

    def read(inputs: DecodeInputs, tokens: Array, lengths: Array) -> DecodeState:
        params, router_state, keys, limits, ends = inputs
        batch, length = tokens.shape
        cache = initial_cache(model, execution, batch=batch, length=shape.capacity)
        places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        mask = places < lengths[:, None]
        options = {"positions": places, "token_mask": mask, "logits_at": lengths - 1}
        logits, cache = logits_of(params, tokens, cache, router_state, **options)
        token = shape.choose(whole(logits[:, -1]), keys[0], limits)
        return DecodeState(token, lengths, jnp.isin(token, ends), cache)

    def write(
        inputs: DecodeInputs, state: DecodeState, first: Array, count: Array
    ) -> tuple[DecodeState, Array]:
        params, router_state, keys, limits, ends = inputs

        def body(index: Array, carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
            (token, length, is_done, cache), written = carry
            logits, cache = logits_of(
                params, token[:, None], cache, router_state, positions=length[:, None]
            )
            new = shape.choose(whole(logits[:, -1]), keys[first + index], limits)
            if len(ends):
                new = jnp.where(is_done, ends[0], new)
                is_done = is_done | jnp.isin(new, ends)
            written = jax.lax.dynamic_update_slice(written, new[:, None], (jnp.int32(0), index))
            return DecodeState(new, length + 1, is_done, cache), written

        nothing = jnp.zeros((len(state.token), _AT_ONCE), jnp.int32)
        return jax.lax.fori_loop(jnp.int32(0), count, body, (state, nothing))

    return Programs(jax.jit(read), jax.jit(write, donate_argnums=1))


def _rows(prompt: Any, vocab_size: int) -> list[np.ndarray]:
    """Return the prompts as arrays of ids.

    Raises:
        ValueError: There is no prompt, one is empty, or it is not a row of ids of the vocabulary.
    """
    if getattr(prompt, "ndim", 2) != 2 or not len(prompt) or np.ndim(prompt[0]) != 1:
        raise ValueError(
            "prompt must be rows of token ids: an array [B, S], or a list of lists such as"
            " [[1, 2, 3]]"
        )
    rows = [np.asarray(row) for row in prompt]
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(
                f"generation needs a prompt of at least one token: row {number} is empty"
            )
        if not np.issubdtype(row.dtype, np.integer) or row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(
                f"prompt row {number} must be token ids from 0 to {vocab_size - 1}, and holds"
                f" {row.min()} to {row.max()} ({row.dtype})"
            )
    return rows


def cache_length(longest: int, num_tokens: int) -> int:
    """Return the positions of the cache of `generate`.

    Args:
        longest: Tokens of the longest prompt.
        num_tokens: Tokens to generate.
    """
    return _round_to(longest) + _round_to(num_tokens)


def _round_to(length: int) -> int:
    """Return the smallest of the sizes 32, 48, 64, 96, 128, ... that is at least `length`."""
    size = _SHORTEST
    while size < length:
        size *= 2
    return size * 3 // 4 if size > _SHORTEST and length <= size * 3 // 4 else size
