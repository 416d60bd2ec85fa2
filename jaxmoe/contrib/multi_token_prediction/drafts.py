# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates with drafts of the modules: as many tokens in one pass of the model as they guess.

    draft     module 1 predicts the token after the latest one, module 2 the token after that, ...
    check     one pass of the model over the latest token and the drafts; at each of them it draws
              the next token with the key of that token
    accept    the drawn tokens up to the first that is not the draft; all of them if all are

Every token is drawn from the logits of the model with the key that it has without drafts, so the
tokens are the same, whatever the temperature and the filters. A module draws its drafts with the
same keys, which makes equal draws likelier (arXiv 2211.17192 accepts in distribution; a shared draw
accepts the token itself).

Modules have caches of their own. A token that a module has read as a draft, and that was not
accepted, is computed again before the next draft, with all that follow it.

    programs = DraftPrograms()
    for tokens in stream(model, params, prompt, ..., programs=programs): ...
    print(programs.report)

Source: DeepSeek-V3, arXiv 2412.19437, section 5.4.3.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.contrib.multi_token_prediction.modules import module_outputs
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import Cache, initial_cache, num_slots
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import DecodeInputs, HostPrograms, Programs, ProgramShape
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.models.transformer import forward

_AT_ONCE: Final = 64
"""Most tokens that the program generates between two looks of the host, see `decode.stream`."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftReport:
    """What became of the drafts of one generation."""

    num_passes: int
    """Passes of the model over a row, that of the prompt left out."""
    num_drafts: int
    """Tokens that the modules guessed."""
    num_accepted: int
    """Guesses that the model drew as well."""

    @property
    def acceptance(self) -> float:
        """Share of the drafts that were accepted; 0 without drafts."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    def __str__(self) -> str:
        share = f"({self.acceptance:.1%}), {self.num_passes} passes of the model"
        return f"{self.num_accepted} of {self.num_drafts} drafted tokens accepted {share}"


class DraftState(NamedTuple):
    """Rows between two calls of the program; U positions."""

    token: Int[Array, " B"]
    """Latest token, which the caches lack."""
    length: Int[Array, " B"]
    """Position of `token`."""
    is_done: Bool[Array, " B"]
    """Whether the row has ended."""
    cache: Cache
    """Caches of the model."""
    modules: Any
    """Cache of the layers of the modules."""
    hidden: Float[Array, "B U D"]
    """States of the model after its final norm."""
    tokens: Int[Array, "B U"]
    """Tokens by position: the prompt, and what was generated or drafted."""
    counts: Int[Array, " 3"]
    """Passes, drafts and accepted drafts, of all rows."""


class DraftPrograms(HostPrograms):
    """Makes the programs of `decode.stream` for a model with modules, on one device."""

    def __init__(self):
        self._counts: Any = (0, 0, 0)

    @property
    def report(self) -> DraftReport:
        """What became of the drafts of the last generation."""
        return DraftReport(*np.asarray(self._counts).tolist())

    def __str__(self) -> str:
        return f"drafts: {self.report}"

    def close(self) -> None:
        """Do nothing: there are no threads, and the report stays."""

    def __call__(self, shape: ProgramShape) -> Programs:
        """Return the programs of a generation.

        Raises:
            ValueError: The model has no modules, its state cannot go back, or there is a mesh.
        """
        check_modules(shape.model, shape.execution)
        if any(size > 1 for size in jax.sharding.get_abstract_mesh().shape.values()):
            raise ValueError("drafts are made on one device: leave the mesh out, or the drafts")
        programs = _compile_programs(shape)

        def read(*arguments: Any) -> DraftState:
            self._counts = (0, 0, 0)
            return programs.read(*arguments)

        def write(*arguments: Any) -> tuple[DraftState, Array]:
            state, written = programs.write(*arguments)
            self._counts = np.asarray(state.counts)
            return state, written

        return Programs(read, write)


def check_modules(model: ModelConfig, execution: ExecutionConfig) -> None:
    """Refuse models whose modules cannot draft.

    Args:
        model: Model with modules.
        execution: How it is computed.

    Raises:
        ValueError: It has none, or a state cannot go back to an earlier token.
    """
    if model.further_scan is None:
        raise ValueError(
            "drafts are made by modules of the model, and model.options.predictor is not set:"
            " generate without drafts"
        )
    recurrent = [kind.mixer.name for kind in model.kinds if kind.mixer.is_recurrent]
    if recurrent:
        raise ValueError(
            f"drafts that are not accepted are taken back, and the state of {recurrent[0]} cannot"
            " go back: generate without drafts"
        )
    if execution.cache_reading.name != "whole":
        raise ValueError(
            f"reading:{execution.cache_reading.name} keeps other pages after tokens that are taken"
            " back: read the whole cache, or generate without drafts"
        )


@functools.lru_cache(maxsize=16)
def _compile_programs(shape: ProgramShape) -> Programs:
    """Return the jitted programs for one model, cache size and kind of sampling."""
    drafter = _Drafter(shape)
    return Programs(jax.jit(drafter.read), jax.jit(drafter.write, donate_argnums=1))


class _Drafter:
    """A model and its modules, with their caches, for rows that stop where drafts are wrong."""

    def __init__(self, shape: ProgramShape):
        scan = shape.model.further_scan
        assert scan is not None  # `check_modules`
        (self._stack,) = scan.stacks
        self._model = shape.model
        self._execution = shape.execution
        self._depth = self._stack.num_layers
        # Behind the last token: drafts, and places that stand for those before a row.
        self._length = shape.capacity + 3 * self._depth + 1
        self._is_greedy = shape.is_greedy
        self._pick = shape.choose

    def read(
        self, inputs: DecodeInputs, prompt: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> DraftState:
        """Return the rows after their first token; see `decode.Programs`."""
        params, router_state, keys, limits, ends = inputs
        model = self._model
        execution = self._execution
        batch, width = prompt.shape
        places = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
        mask = places < lengths[:, None]
        output = forward(
            model,
            execution,
            params,
            prompt,
            router_state=router_state,
            cache=initial_cache(model, execution, batch=batch, length=self._length),
            positions=places,
            token_mask=mask,
            logits_at=lengths - 1,
        )
        assert output.logits is not None and output.cache is not None  # asked for
        token = self._pick(output.logits[:, -1], keys[0], limits)
        rows = jnp.arange(batch, dtype=jnp.int32)
        missing = ((0, 0), (0, self._length - width))
        tokens = jnp.pad(jnp.where(mask, prompt, 0), missing).at[rows, lengths].set(token)
        modules = self._stack.kind.mixer.initial_cache(
            execution,
            layers=self._depth,
            batch=batch,
            slots=num_slots(execution, self._length),
        )
        distances = range(1, self._depth + 1)
        ahead = jnp.stack([tokens[:, k : k + width] for k in distances], axis=-1)
        is_known = jnp.stack([places + k <= lengths[:, None] for k in distances], axis=-1)
        stream, _ = module_outputs(
            model,
            execution,
            params,
            output.hidden,
            {"tokens": prompt, "positions": places, "token_mask": mask, "context": {}},
            ahead,
            is_known,
            router_state=router_state,
            cache=modules,
        )
        return DraftState(
            token=token,
            length=lengths,
            is_done=jnp.isin(token, ends),
            cache=output.cache,
            modules=stream.cache,
            hidden=jnp.pad(output.hidden, (*missing, (0, 0))),
            tokens=tokens,
            counts=jnp.zeros(3, jnp.int32),
        )

    def write(
        self, inputs: DecodeInputs, state: DraftState, first: Array, count: Array
    ) -> tuple[DraftState, Array]:
        """Return the rows after further tokens, and the tokens; see `decode.Programs`."""
        ends = inputs.ends
        batch = len(state.token)
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        offsets = jnp.arange(self._depth + 1, dtype=jnp.int32)[None]

        def room_of(state: DraftState, number: Array) -> Array:
            return jnp.where(state.is_done, 0, count - number)

        def body(carry: tuple[DraftState, Array, Array]) -> tuple[DraftState, Array, Array]:
            state, number, written = carry
            room = room_of(state, number)
            state, drawn, num_kept = self._draft_and_check(inputs, state, first + number, room)
            places = jnp.where(offsets < num_kept[:, None], number[:, None] + offsets, _AT_ONCE)
            return state, number + num_kept, written.at[rows, places].set(drawn, mode="drop")

        written = jnp.full((batch, _AT_ONCE), ends[0] if len(ends) else 0, jnp.int32)
        state, _, written = jax.lax.while_loop(
            lambda carry: jnp.any(room_of(carry[0], carry[1]) > 0),
            body,
            (state, jnp.zeros(batch, jnp.int32), written),
        )
        return state, written

    def _draft_and_check(
        self, inputs: DecodeInputs, state: DraftState, number: Array, room: Array
    ) -> tuple[DraftState, Int[Array, "B k"], Int[Array, " B"]]:
        """Return the rows after a pass, the drawn tokens, and how many of them each row keeps.

        Args:
            inputs: Parameters, keys and limits.
            state: Rows.
            number: Tokens that each row has generated.
            room: Tokens that each row still takes; a row without room stays as it is.
        """
        guesses, modules = self._draft(inputs, state, number)
        rows = jnp.arange(len(room), dtype=jnp.int32)[:, None]
        offsets = jnp.arange(self._depth + 1, dtype=jnp.int32)[None]
        places = state.length[:, None] + offsets
        output = forward(
            self._model,
            self._execution,
            inputs.params,
            jnp.concatenate([state.token[:, None], guesses], axis=1),
            router_state=inputs.router_state,
            cache=state.cache,
            positions=places,
        )
        assert output.logits is not None and output.cache is not None  # asked for
        logits = output.logits
        draws = [self._draw(logits[:, j], inputs, number + j) for j in range(self._depth + 1)]
        drawn = jnp.stack(draws, axis=1)
        is_right = jnp.cumprod((drawn[:, :-1] == guesses).astype(jnp.int32), axis=1)
        num_right = jnp.sum(is_right, axis=1)
        num_kept = jnp.minimum(num_right + 1, room)
        is_end = jnp.isin(drawn, inputs.ends) & (offsets < num_kept[:, None])
        has_end = jnp.any(is_end, axis=1)
        num_kept = jnp.where(has_end, jnp.argmax(is_end, axis=1).astype(jnp.int32) + 1, num_kept)
        is_active = room > 0
        last = jnp.take_along_axis(drawn, jnp.maximum(num_kept - 1, 0)[:, None], axis=1)[:, 0]
        # Entries behind the tokens that are kept are written again before they are read.
        hidden = state.hidden.at[rows, places].set(output.hidden)
        tokens = state.tokens.at[rows, places + 1].set(drawn)
        ones = jnp.ones_like(num_kept)
        counts = jnp.stack([ones, self._depth * ones, num_right])
        counts = counts.at[2].min(num_kept)
        new = DraftState(
            token=jnp.where(is_active, last, state.token),
            length=state.length + num_kept,
            is_done=state.is_done | has_end,
            cache=output.cache,
            modules=modules,
            hidden=jnp.where(is_active[:, None, None], hidden, state.hidden),
            tokens=jnp.where(is_active[:, None], tokens, state.tokens),
            counts=state.counts + jnp.sum(jnp.where(is_active[None], counts, 0), axis=1),
        )
        return new, drawn, num_kept

    def _draft(
        self, inputs: DecodeInputs, state: DraftState, number: Array
    ) -> tuple[Int[Array, "B k"], Any]:
        """Return the token that each module draws, and their cache.

        A module reads the last W = 2 K positions that have a state of the model: K + 1 may be new,
        and at K - 1 before these a module may have read a draft.

        Args:
            inputs: Parameters, keys and limits.
            state: Rows.
            number: Tokens that each row has generated.
        """
        model = self._model
        execution = self._execution
        depth = self._depth
        width = 2 * depth
        rows = jnp.arange(len(number), dtype=jnp.int32)
        end = state.length[:, None]
        places = end - width + jnp.arange(width, dtype=jnp.int32)[None]
        is_there = places >= 0
        # A place before the row becomes one behind it, whose entries are written before read.
        positions = jnp.where(is_there, places, end + depth + 1 + places + width)
        where = jnp.maximum(places, 0)
        hidden = jnp.take_along_axis(state.hidden, where[:, :, None], axis=1)
        ids = jnp.take_along_axis(state.tokens, where, axis=1)
        arrays = {"tokens": ids, "positions": positions, "token_mask": is_there, "context": {}}
        head = head_weight(inputs.params, model)
        tokens = state.tokens
        modules = state.modules
        guesses = []
        for k in range(depth):
            ahead = jnp.take_along_axis(tokens, where + k + 1, axis=1)
            stream, outputs = module_outputs(
                model,
                execution,
                inputs.params,
                hidden,
                arrays,
                ahead[:, :, None],
                is_there[:, :, None],
                first=k,
                router_state=inputs.router_state,
                cache=modules,
            )
            hidden = stream.x
            modules = stream.cache
            logits = output_logits(outputs.hidden[0][:, -1:], head, model, execution)[:, -1]
            guesses.append(self._draw(logits, inputs, number + k))
            tokens = tokens.at[rows, state.length + k + 1].set(guesses[-1])
        return jnp.stack(guesses, axis=1), modules

    def _draw(
        self, logits: Float[Array, "B V"], inputs: DecodeInputs, number: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """Return the token of each row with its own key, as a draw of all rows would draw it.

        Args:
            logits: Logits of the next token.
            inputs: Keys and limits.
            number: Number of the token of each row, from 0.
        """
        keys = inputs.keys[jnp.minimum(number, len(inputs.keys) - 1)]
        if self._is_greedy:
            return self._pick(logits, inputs.keys[0], inputs.limits)
        rows = jnp.arange(len(logits), dtype=jnp.int32)
        return jax.vmap(lambda key, row: self._pick(logits, key, inputs.limits)[row])(keys, rows)
