# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scores given continuations, and decodes greedily, for evaluation harnesses.

    scorer = Scorer(model, params, max_length=2048)
    [(log_prob, is_greedy)] = scorer.continuations([(context, continuation)])
    tokens = scorer.greedy(context, 64, lambda written: written[-1] == end)

Everything is in token ids. Rows are padded on the right to a few shapes (max_length, its half, its
quarter and so on), so that few programs are compiled; padding is neither attended to nor routed. A
prompt is read in pieces of 1, 8, 64, ... tokens, without padding. Log-probabilities are float32,
their sums float64.

Rows longer than `max_length` are truncated on the left and counted in `num_truncated`; a
continuation that is too long by itself is refused. Sampling is in `jaxmoe/models/decode.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.training.cross_entropy import token_nll
from sharding import axes as ax

_SHAPES = 4
_SHORTEST = 32
_PIECE = 8


class Scorer:
    """Scores and decodes token ids with one model.

    Args:
        model: Causal model.
        params: Parameters, on one device or laid out on the current mesh.
        max_length: Tokens that the model reads at once.
        batch_size: Rows that are computed together.
        router_state: Router state, stacked over MoE layers.
        execution: How it is computed; its mesh must be current in every call.

    Raises:
        ValueError: A model that is not causal, sizes below 1, or a batch that the mesh does not
            divide.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Any,
        *,
        max_length: int,
        batch_size: int = 8,
        router_state: Any = None,
        execution: ExecutionConfig | None = None,
    ):
        if not model.attention.is_causal:
            raise ValueError(
                "model.attention.is_causal=False: this model sees what follows, and has no"
                " likelihood of a continuation: evaluate its bound with experiments.evaluate"
            )
        if max_length < 2 or batch_size < 1:
            raise ValueError(
                f"max_length={max_length} must be at least 2, and batch_size={batch_size} at least"
                " 1"
            )
        self.max_length = max_length
        self.batch_size = batch_size
        self.num_truncated = 0
        """Number of rows that were truncated on the left."""
        self._model = model
        self._params = params
        self._router_state = router_state
        self._execution = WholeRowsConfig.of(execution or ExecutionConfig())
        axes = self._execution.placement.mesh_axes(ax.ACT_BATCH)
        sizes = jax.sharding.get_abstract_mesh().shape if axes else {}
        self._shards = math.prod(sizes[axis] for axis in axes)
        if batch_size % self._shards:
            raise ValueError(
                f"batch_size={batch_size} must be divisible by the {self._shards} devices that"
                f" share a batch: choose a multiple of {self._shards}"
            )

    def continuations(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """Return log-probability in nats, and whether every token is the likeliest, per request.

        Args:
            requests: Context and continuation, at least one token each.

        Raises:
            ValueError: An empty context or continuation, or one longer than max_length.
        """
        rows = [self._row(context, continuation) for context, continuation in requests]
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))  # full batches
        answers: dict[int, tuple[float, bool]] = {}
        groups: dict[int, list[int]] = {}
        for row in order:
            groups.setdefault(self._pad(len(rows[row][0])), []).append(row)
        for length, members in groups.items():
            for first in range(0, len(members), self.batch_size):
                group = members[first : first + self.batch_size]
                answers |= zip(
                    group, self._compute([rows[row] for row in group], length), strict=True
                )
        return [answers[row] for row in range(len(rows))]

    def greedy(
        self, context: Sequence[int], max_tokens: int, is_done: Callable[[list[int]], bool]
    ) -> list[int]:
        """Return the greedy continuation of a context.

        Args:
            context: At least one token; its beginning is cut if it does not fit.
            max_tokens: Largest number of tokens to write.
            is_done: Called with the written tokens after each one; true ends the text.

        Raises:
            ValueError: An empty context, or one that does not fit beside `max_tokens`.
        """
        prompt = self.cut(context, max_tokens)
        cache = self._empty()
        num_read = 0
        token = 0
        written = list[int]()
        while prompt:
            piece = max(_PIECE**power for power in range(8) if _PIECE**power <= len(prompt))
            token, cache = self._read(prompt[:piece], num_read, cache)
            prompt = prompt[piece:]
            num_read = num_read + piece
        while True:
            written.append(token)
            if len(written) == max_tokens or is_done(written):
                return written
            token, cache = self._read([token], num_read, cache)
            num_read += 1

    def cut(self, context: Sequence[int], max_tokens: int) -> list[int]:
        """Return a context without its beginning if it does not fit beside the tokens to write.

        Args:
            context: At least one token.
            max_tokens: Largest number of tokens to write.

        Raises:
            ValueError: An empty context, or one that does not fit beside `max_tokens`.
        """
        space = self.max_length - max_tokens
        if not context or max_tokens < 1 or space < 1:
            raise ValueError(
                f"a context of {len(context)} and {max_tokens} tokens to write must be at least 1"
                f" each, and fit together into max_length={self.max_length}"
            )
        self.num_truncated += len(context) > space
        return [int(token) for token in context[-space:]]

    def _row(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens read, and the targets of the last of them."""
        if not len(context) or not len(continuation):
            raise ValueError("a context and its continuation must have a token at least")
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens is longer than the"
                f" max_length={self.max_length} of the model: set a larger one, or cut it"
            )
        tokens = np.asarray([*context, *continuation], np.int32)
        self.num_truncated += len(tokens) > self.max_length + 1
        return tokens[-(self.max_length + 1) :][:-1], tokens[-len(continuation) :]

    def _pad(self, length: int) -> int:
        """Return the smallest of the shapes that holds a row."""
        shapes = [-(-self.max_length // 2**power) for power in range(_SHAPES)]
        shapes = [shape for shape in shapes if shape >= _SHORTEST] or shapes[:1]
        return min(shape for shape in shapes if shape >= length)

    def _compute(
        self, rows: Sequence[tuple[np.ndarray, np.ndarray]], length: int
    ) -> list[tuple[float, bool]]:
        tokens, targets, segments = np.zeros((3, self.batch_size, length), np.int32)
        for row, (read, predicted) in enumerate(rows):
            tokens[row, : len(read)], segments[row, : len(read)] = read, 1
            targets[row, len(read) - len(predicted) : len(read)] = predicted
        # A batch that is not full repeats its first row: no row is without a token.
        for row in range(len(rows), self.batch_size):
            tokens[row], segments[row] = tokens[0], segments[0]
        nll, is_top = jax.device_get(
            _make_scorer(self._model, self._execution)(
                self._params, self._router_state, tokens, targets, segments
            )
        )
        results = []
        for row, (read, predicted) in enumerate(rows):
            part = slice(len(read) - len(predicted), len(read))
            results.append((-math.fsum(nll[row, part].tolist()), bool(is_top[row, part].all())))
        return results

    def _empty(self) -> Any:
        return initial_cache(
            self._model, self._execution, batch=self._shards, length=self.max_length
        )

    def _read(self, piece: Sequence[int], first: int, cache: Any) -> tuple[int, Any]:
        """Return the likeliest token after a piece whose first token has the position `first`."""
        tokens = np.tile(np.asarray(piece, np.int32), (self._shards, 1))
        run = _make_continuation(self._model, self._execution)
        token, cache = run(self._params, self._router_state, tokens, np.int32(first), cache)
        return int(token), cache


@functools.lru_cache(maxsize=8)
def _make_scorer(model: ModelConfig, execution: ExecutionConfig) -> Callable[..., Any]:
    """Return a jitted function to nll of targets [B S] and whether each is the likeliest."""

    def run(params: Any, router_state: Any, tokens: Array, targets: Array, segments: Array) -> Any:
        options = {"segment_ids": segments, "router_state": router_state}
        output = forward(model, execution, params, tokens, **options)
        assert output.logits is not None  # asked for by default
        logits = execution.placement.place(output.logits.astype(jnp.float32), (None, None, None))
        return token_nll(logits, targets), jnp.argmax(logits, axis=-1) == targets

    return jax.jit(run)


@functools.lru_cache(maxsize=8)
def _make_continuation(model: ModelConfig, execution: ExecutionConfig) -> Callable[..., Any]:
    """Return a jitted function to the likeliest next token and the cache."""

    def run(params: Any, router_state: Any, tokens: Array, first: Array, cache: Any) -> Any:
        positions = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        output = forward(
            model,
            execution,
            params,
            tokens,
            positions=jnp.broadcast_to(positions, tokens.shape),
            router_state=router_state,
            cache=cache,
        )
        assert output.logits is not None  # asked for by default
        last = execution.placement.place(output.logits[:, -1], (None, None))
        return jnp.argmax(last[0]), output.cache

    return jax.jit(run, donate_argnums=4)
