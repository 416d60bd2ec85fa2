# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Drafts of the modules in serving: a program behind each step, over pages of the modules.

With p the position of the latest token that a step has computed and is right, and e = p + 1 that of
the token drawn behind it, module k reads the state of position i and token i + k, and writes its
keys and values at i. It guesses token e + k at i = p.

    rows     2 K positions of each sequence with a single token, up to K behind the single one
             (those behind p are padding), then all positions of pieces of prompts
    ahead    token i + k of each row and module: known up to e, behind it guess i + k - e

At the last K - 1 positions before a step a module may have read a guess that was wrong: they are
computed again, from states of the model that are kept in pages of their own (for K > 1). Pages of
equal beginnings are shared: their last K entries were computed with the tokens that followed then,
which changes no token of an answer, at most a guess.

Source: DeepSeek-V3, arXiv 2412.19437, section 5.4.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.contrib.multi_token_prediction.drafts import check_modules
from jaxmoe.contrib.multi_token_prediction.modules import module_outputs
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.models.sampling import Limits, choose_each
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.drafting import ComputedStep, ComputedWork, ServedDrafter
from jaxmoe.serve.device.draw import keys_of
from jaxmoe.serve.device.layers import stack_layers
from jaxmoe.serve.device.rows import no_limits, set_limits
from jaxmoe.serve.device.step import Pools
from sharding.sequence_parallel import PageTables

_STATES: Final = "states_of_the_model"
"""Path of the pages [1 P G D] of states of the model."""


class DraftInputs(NamedTuple):
    """Rows of the modules, and the sequences that they belong to: T rows, N sequences."""

    places: Int[Any, " T"]
    """Place of the state of each row among those of the step; -1 for one of an earlier step."""
    tokens: Int[Any, " T"]
    """Token of each row."""
    positions: Int[Any, " T"]
    """Its position; -1 for padding."""
    tables: PageTables
    ahead: Int[Any, "T K"]
    """Token that each module reads beside the state, where it is known."""
    numbers: Int[Any, "T K"]
    """Number of the guess that it reads instead, from 1; 0 where the token is known."""
    has_token: Bool[Any, "T K"]
    """Whether there is such a token."""
    owners: Int[Any, " T"]
    """Sequence of each row."""
    last: Int[Any, " N"]
    """Row of the last computed token of each sequence."""
    seeds: Int[Any, " N"]
    indices: Int[Any, " N"]
    """Number within the answer of the latest token that was drawn, from 0."""
    limits: Limits


class ModulesDrafter(ServedDrafter):
    """Modules of a model that draft for the sequences of an executor."""

    def __init__(self, model: ModelConfig, execution: ExecutionConfig, sizes: ExecutorConfig):
        """Make the program.

        Args:
            model: Model with modules.
            execution: How it is served.
            sizes: Sizes of the executor.

        Raises:
            ValueError: The modules cannot draft for this model.
        """
        check_modules(model, execution)
        scan = model.further_scan
        assert scan is not None  # `check_modules`
        (self._stack,) = scan.stacks
        self._model = model
        self._execution = execution
        self._sizes = sizes
        self._program = make_drafts(model, execution)

    @property
    def depth(self) -> int:
        """Modules, of which each guesses a token (K)."""
        return self._stack.num_layers

    def initial_pools(self, *, pages: int, size: int) -> Pools:
        """Return empty pages of keys and values of the modules, and of states for K > 1."""
        mixer: Any = self._stack.kind.mixer
        keys = mixer.initial_pages(self._execution, layers=self.depth, pages=pages, size=size)
        pools = {self._stack.path: keys}
        if self.depth > 1:
            shape = (1, pages, size, self._model.embed_dim)
            states = jnp.zeros(shape, self._execution.precision.compute_dtype)
            pools[_STATES] = self._execution.placement.place(states, (None,) * states.ndim)
        return pools

    def guess(
        self, params: Any, router_state: Any, pools: Pools, step: ComputedStep
    ) -> tuple[Any, Pools]:
        """Return the guesses behind all works, see `ServedDrafter.guess`."""
        inputs = self._inputs(step.works, step.pieces, step.context_length)
        return self._program(params, router_state, pools, step.hidden, inputs)

    def _inputs(
        self, works: Sequence[ComputedWork], pieces: tuple[int, int], context_length: int
    ) -> DraftInputs:
        """Return the rows of some works; arrays of padding where there is none."""
        depth = self.depth
        sizes = self._sizes
        singles = sizes.shapes.singles
        num_pieces, length = pieces
        num_rows = singles * 2 * depth + num_pieces * length
        num_sequences = singles + num_pieces
        width = num_pages(context_length, sizes.page_size)
        inputs = DraftInputs(
            places=np.full(num_rows, -1, np.int32),
            tokens=np.zeros(num_rows, np.int32),
            positions=np.full(num_rows, -1, np.int32),
            tables=PageTables(
                np.full(num_rows, sizes.num_pages * sizes.page_size, np.int32),
                np.zeros((singles * 2 * depth, width), np.int32),
                np.zeros((num_pieces, width), np.int32),
            ),
            ahead=np.zeros((num_rows, depth), np.int32),
            numbers=np.zeros((num_rows, depth), np.int32),
            has_token=np.zeros((num_rows, depth), bool),
            owners=np.zeros(num_rows, np.int32),
            last=np.zeros(num_sequences, np.int32),
            seeds=np.zeros(num_sequences, np.int32),
            indices=np.zeros(num_sequences, np.int32),
            limits=no_limits(num_sequences, self._model.vocab_size),
        )
        first_piece = singles * (1 + depth)  # among the tokens of a step
        num_singles = sum(computed.place < first_piece for computed in works)
        for number, computed in enumerate(works):
            pages = np.array(computed.work.pages[:width], np.int32)
            if number < num_singles:
                row = number * 2 * depth
                begin = computed.work.start - depth + 1
                inputs.tables.singles[row : row + 2 * depth, : len(pages)] = pages
            else:
                piece = number - num_singles
                row = singles * 2 * depth + piece * length
                begin = computed.work.start
                inputs.tables.pieces[piece, : len(pages)] = pages
            self._fill(inputs, computed, number, row - begin, max(begin, 0))
        return inputs

    def _fill(
        self, inputs: DraftInputs, computed: ComputedWork, number: int, offset: int, begin: int
    ) -> None:
        """Write the rows of a work, in place.

        Args:
            inputs: Host arrays.
            computed: The work.
            number: Its place among the works.
            offset: Row of position 0.
            begin: Position of its first row.
        """
        work, place, drawn = computed
        end = computed.end
        positions = np.arange(begin, end)
        rows = positions + offset
        size = self._sizes.page_size
        # The tokens from `begin` on; behind those that are known, guesses are read.
        tokens = np.array([*work.history[begin : end + self.depth], *drawn], np.int32)
        inputs.positions[rows] = positions
        inputs.places[rows] = np.where(positions >= work.start, positions - work.start + place, -1)
        inputs.tokens[rows] = tokens[positions - begin]
        inputs.tables.slots[rows] = (
            np.array(work.pages)[positions // size] * size + positions % size
        )
        inputs.owners[rows] = number
        inputs.last[number] = end - 1 + offset
        for k in range(self.depth):
            where = positions + k + 1
            inputs.ahead[rows, k] = tokens[np.minimum(where - begin, len(tokens) - 1)]
            inputs.numbers[rows, k] = np.maximum(where - end, 0) if drawn else 0
            inputs.has_token[rows, k] = (where - begin < len(tokens)) | bool(drawn)
        inputs.seeds[number] = work.sampling.seed
        inputs.indices[number] = work.index + max(len(drawn) - 1, 0)
        set_limits(inputs.limits, number, work.sampling)


@functools.lru_cache(maxsize=16)
def make_drafts(
    model: ModelConfig, execution: ExecutionConfig
) -> Callable[[Any, Any, Pools, Any, DraftInputs], tuple[Int[Array, "N K"], Pools]]:
    """Return the jitted `(params, router_state, pools, hidden, inputs) -> (guesses, pools)`.

    The pools are donated and written in place; those of the model stay as they are.

    Args:
        model: Model with modules.
        execution: How it is served.
    """
    scan = model.further_scan
    assert scan is not None  # `check_modules`
    (stack,) = scan.stacks
    mixer: Any = stack.kind.mixer
    place = execution.placement.place
    whole = (None, None, None)

    def draft(
        params: Any, router_state: Any, pools: Pools, hidden: Array, inputs: DraftInputs
    ) -> tuple[Int[Array, "N K"], Pools]:
        params = stack_layers(params)
        states, pools = _states_of(hidden, pools, inputs)
        cache = mixer.paged_cache(pools[stack.path], inputs.tables)
        arrays = {
            "tokens": jnp.asarray(inputs.tokens)[None],
            "positions": jnp.asarray(inputs.positions)[None],
            "token_mask": jnp.asarray(inputs.positions)[None] >= 0,
            "context": {},
        }
        head = head_weight(params, model)
        guesses = jnp.zeros((len(inputs.last), stack.num_layers), jnp.int32)
        for k in range(stack.num_layers):
            number = jnp.asarray(inputs.numbers)[:, k]
            guessed = guesses[inputs.owners, jnp.maximum(number - 1, 0)]
            ahead = jnp.where(number > 0, guessed, inputs.ahead[:, k])
            stream, outputs = module_outputs(
                model,
                execution,
                params,
                states,
                arrays,
                ahead[None, :, None],
                jnp.asarray(inputs.has_token)[None, :, k : k + 1],
                first=k,
                router_state=router_state,
                cache=cache,
            )
            states, cache = stream.x, stream.cache
            # Whole on every device, as in a step.
            last = place(outputs.hidden[0], whole)[:, inputs.last]
            logits = place(output_logits(last, head, model, execution), whole)[0]
            keys = keys_of(inputs.seeds, inputs.indices + (k + 1))
            guesses = guesses.at[:, k].set(choose_each(logits, keys, inputs.limits))
        return guesses, pools | {stack.path: cache.pool}

    return jax.jit(draft, donate_argnums=2)


def _states_of(
    hidden: Float[Array, "1 S D"], pools: Pools, inputs: DraftInputs
) -> tuple[Float[Array, "1 T D"], Pools]:
    """Return the states of all rows, and the pools with those of the step."""
    places = jnp.asarray(inputs.places)
    states = hidden[0, jnp.maximum(places, 0)]
    if _STATES not in pools:
        return states[None], pools
    pool = pools[_STATES]
    _, num_of_pages, size, _ = pool.shape
    slots = jnp.asarray(inputs.tables.slots)
    page, place = slots // size, slots % size
    earlier = pool.at[0, page, place].get(mode="clip")
    is_new = places >= 0
    page = jnp.where(is_new, page, num_of_pages)  # others are not written
    pool = pool.at[0, page, place].set(states.astype(pool.dtype), mode="drop")
    states = jnp.where(is_new[:, None], states, earlier.astype(states.dtype))
    return states[None], pools | {_STATES: pool}
