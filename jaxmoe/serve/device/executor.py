# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of an instance on devices: arrays of a step in, drawn tokens out.

There is a program for each shape of a step and each length of a table of pages. All are compiled
when the executor is made and are listed in `programs`; serving compiles nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxmoe.execution import ExecutionConfig, ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.sampling import Limits
from jaxmoe.routing.replay import why_not_recorded
from jaxmoe.scaling.initialize import lay_out
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.pages import initial_pools, why_not_served
from jaxmoe.serve.device.step import StepInputs, StepOptions, StepOutputs, make_step
from jaxmoe.serve.device.transfers import Held, make_transfers
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.requests import Request, Result, Sampling
from jaxmoe.serve.step import Step, Work
from sharding.sequence_parallel import PageTables


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Sizes of what is compiled and allocated."""

    num_pages: int = 1024
    """Pages of the pool."""
    page_size: int = 16
    """Tokens of a page (G)."""
    shapes: Shapes = Shapes(singles=8, pieces=((1, 64),))
    """Single tokens and pieces of a step."""
    context_lengths: tuple[int, ...] = (2048,)
    """Tokens of a sequence that attention reads, ascending; a step takes the smallest that holds
    its sequences, and the last is the most that a sequence may have."""
    num_logprobs: int = 0
    """Most likely tokens whose log-probabilities a request may ask for."""
    has_experts: bool = False
    """Whether a request may ask for the chosen experts. They are kept in host memory for every
    token in a page, a number of 1 or 2 bytes for each MoE layer and slot."""

    def __post_init__(self):
        lengths = self.context_lengths
        if not lengths or min(lengths) < 1 or sorted(set(lengths)) != [*lengths]:
            raise ValueError(
                f"context_lengths={lengths} must be one or more lengths above 0, ascending"
            )
        if self.num_pages < 1 or self.page_size < 1:
            raise ValueError(
                f"num_pages={self.num_pages} and page_size={self.page_size} must be above 0"
            )
        held = self.num_pages * self.page_size
        if held < lengths[-1]:
            raise ValueError(
                f"num_pages={self.num_pages} x page_size={self.page_size} hold {held} tokens, and"
                f" context_lengths allows a sequence of {lengths[-1]}: set num_pages to"
                f" {num_pages(lengths[-1], self.page_size)}, or shorter context_lengths"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One compiled shape of a step."""

    pieces: tuple[int, int]
    """Number and length of the pieces beside the single tokens."""
    context_length: int
    """Tokens of a sequence that attention reads."""
    seconds: float = 0.0
    """Time of compilation."""


class ModelExecutor:
    """Computes steps of one model; called by one thread at a time."""

    def __init__(
        self,
        model: ModelConfig,
        params: Any,
        router_state: Any = None,
        *,
        config: ExecutorConfig | None = None,
        execution: ExecutionConfig | None = None,
        mesh: Any = None,
    ):
        """Allocate the pages and compile all programs.

        Args:
            model: Config of the model.
            params: Its parameters, on one device or laid out on the mesh.
            router_state: State of the routers, stacked over MoE layers; fresh when None.
            config: Sizes; defaults when None.
            execution: How the model is computed.
            mesh: Mesh of `sharding.make_mesh` with tensor and expert axes; None for one device.

        Raises:
            ValueError: The model cannot be served, or its experts cannot be recorded as
                `config.has_experts` asks, or the mesh has other axes.
        """
        self.model, self.config = model, config or ExecutorConfig()
        reason = why_not_served(model, execution or ExecutionConfig(), mesh)
        if reason is None and self.config.has_experts:
            reason = why_not_recorded(model)
        if reason is not None:
            raise ValueError(reason)
        self.execution = ServedConfig.of(execution or ExecutionConfig())
        self._mesh, self._router_state = mesh, router_state
        self._params = self._laid_out(params)
        options = StepOptions(num_top=self.config.num_logprobs, has_experts=self.config.has_experts)
        self._step = make_step(model, self.execution, options)
        self._swapped: dict[int, tuple[Held, np.ndarray]] = {}
        self._load: np.ndarray | None = None
        self._move = make_transfers(self.execution)
        self.reset()
        self.programs = tuple(self._compile(one) for one in self._shapes())

    def load(self, params: Any, router_state: Any = None) -> None:
        """Go on with other parameters of the same model; called between requests.

        Pages keep what they hold: requests that shall not begin with pages of the earlier
        parameters have another `salt`.

        Args:
            params: Parameters, laid out as those that the executor was made with.
            router_state: State of the routers; fresh when None.
        """
        self._params, self._router_state = self._laid_out(params), router_state

    def reset(self) -> None:
        """Allocate empty pages, as at the start and after a step that failed."""
        self._swapped.clear()
        self._experts = _no_experts(self.model, self.config)
        with self._in_mesh():
            self._pools = initial_pools(
                self.model, self.execution, pages=self.config.num_pages, size=self.config.page_size
            )

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages on all devices."""
        return sum(part.nbytes for part in jax.tree.leaves(self._pools))

    def run(self, step: Step) -> dict[int, Result]:
        """Compute a step, and return the tokens of the sequences that draw one.

        Args:
            step: Work with its pages taken.

        Returns:
            Results by sequence.
        """
        with self._in_mesh():
            self._transfer(step)
            pieces = self.config.shapes.fitting([len(one.tokens) for one in step.pieces])
            assert pieces is not None  # `check` has compared the plan with the shapes
            longest = max((one.start + len(one.tokens) for one in step.works), default=0)
            length = next(n for n in self.config.context_lengths if n >= longest)
            inputs, rows = self._inputs(step, Program(pieces, length))
            outputs, self._pools = self._step(self._params, self._router_state, self._pools, inputs)
            found = jax.device_get(outputs)
        if found.load is not None:
            self._load = found.load + (0 if self._load is None else self._load)
        if found.experts is not None:
            for work, _, at in rows:
                own = found.experts[:, at : at + len(work.tokens)]
                where = self._places(work, work.start)
                self._experts[where] = own.swapaxes(0, 1)
        return {work.id: self._result(found, work, row) for work, row, _ in rows if work.draws}

    def expert_load(self) -> np.ndarray | None:
        """Return the tokens that each expert of each MoE layer has got [L E]; None before any."""
        return self._load

    def facts(self, *, max_waiting: int) -> Facts:
        """Return the sizes of the instance, for its policies.

        Args:
            max_waiting: Requests in the queue at most.
        """
        config = self.config
        return Facts(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_running=config.shapes.singles,
            max_length=config.context_lengths[-1],
            max_waiting=max_waiting,
            num_layers=self.model.num_layers,
            shapes=config.shapes,
        )

    def check(self, request: Request) -> None:
        """Refuse what a request asks for and the executor does not compute.

        Args:
            request: Request of a client.

        Raises:
            ValueError: An id outside the vocabulary, a seed out of range, an adapter, or more
                log-probabilities or experts than are compiled.
        """
        sampling, vocab_size = request.sampling, self.model.vocab_size
        if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
            raise ValueError(
                f"prompt holds the ids {min(request.prompt)} to {max(request.prompt)}, and the"
                f" model has ids 0 to {vocab_size - 1}: use its tokenizer"
            )
        if not 0 <= sampling.seed < 2**31:
            raise ValueError(f"seed={sampling.seed} must be from 0 to {2**31 - 1}")
        if sampling.num_logprobs > self.config.num_logprobs:
            raise ValueError(
                f"num_logprobs={sampling.num_logprobs} exceeds the {self.config.num_logprobs} that"
                " are compiled: ask for fewer, or set num_logprobs of the executor"
            )
        if sampling.has_experts and not self.config.has_experts:
            raise ValueError(
                "has_experts asks for the chosen experts, which are not compiled: set has_experts"
                " of the executor to True"
            )
        if request.adapter:
            raise ValueError(
                f"adapter={request.adapter!r} is not loaded: this executor serves the model itself"
            )

    def temp_bytes(self, program: Program) -> int:
        """Return the bytes of temporaries of a program, as its compiler plans them."""
        with self._in_mesh():
            inputs, _ = self._inputs(_EMPTY, program)
            given = (self._params, self._router_state, self._pools, inputs)
            found: Any = self._step.lower(*given).compile().memory_analysis()  # pyright: ignore
        return found.temp_size_in_bytes

    def _shapes(self) -> Iterator[Program]:
        pieces = ((0, 0), *self.config.shapes.pieces)
        for one, length in itertools.product(pieces, self.config.context_lengths):
            yield Program(one, length)

    def _compile(self, program: Program) -> Program:
        """Compile a program by computing padding alone."""
        begun = time.perf_counter()
        with self._in_mesh():
            inputs, _ = self._inputs(_EMPTY, program)
            outputs, self._pools = self._step(self._params, self._router_state, self._pools, inputs)
            jax.block_until_ready(outputs)
        return dataclasses.replace(program, seconds=time.perf_counter() - begun)

    def _transfer(self, step: Step) -> None:
        """Move pages before the work: to host memory, back, and on the device."""
        for one in step.out:
            held = self._move.to_host(self._pools, one.pages)
            self._swapped[one.id] = held, self._experts[list(one.pages)]
        for one in step.back:
            held, experts = self._swapped.pop(one.id)
            self._pools = self._move.from_host(self._pools, one.pages, held)
            self._experts[list(one.pages)] = experts[: len(one.pages)]
        if step.copies:
            self._pools = self._move.copy(self._pools, step.copies)
            for source, target in step.copies:
                self._experts[target] = self._experts[source]
        for number in step.dropped:
            self._swapped.pop(number, None)

    def _inputs(self, step: Step, program: Program) -> tuple[StepInputs, list[Any]]:
        """Return the arrays of a step, and (work, row of the tables, first token) of each part."""
        config, (pieces, length) = self.config, program.pieces
        singles, size = config.shapes.singles, config.page_size
        rows, width = singles + pieces, num_pages(program.context_length, size)
        tokens = np.zeros(singles + pieces * length, np.int32)
        positions = np.full(len(tokens), -1, np.int32)
        slots = np.full(len(tokens), config.num_pages * size, np.int32)
        tables = np.zeros((rows, width), np.int32)
        last, seeds, counts = (np.zeros(rows, np.int32) for _ in range(3))
        limits = _no_limits(rows, self.model.vocab_size)
        placed = [(one, row, row) for row, one in enumerate(step.singles)]
        placed += [
            (one, singles + number, singles + number * length)
            for number, one in enumerate(step.pieces)
        ]
        wants_top = False
        for work, row, at in placed:
            end, where = at + len(work.tokens), work.start + np.arange(len(work.tokens))
            pages = np.asarray(work.pages, np.int32)
            tokens[at:end], positions[at:end] = work.tokens, where
            slots[at:end] = pages[where // size] * size + where % size
            tables[row, : min(len(pages), width)] = pages[:width]
            last[row], counts[row], seeds[row] = end - 1, work.index, work.sampling.seed
            _set_limits(limits, row, work.sampling)
            wants_top |= work.draws and work.sampling.num_logprobs > 0
        split = PageTables(slots, tables[:singles], tables[singles:])
        given = (tokens, positions, split, last, seeds, counts, limits, np.bool_(wants_top))
        return StepInputs(*given), placed

    def _places(self, work: Work, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return page and place in it of the tokens of a sequence from a position on."""
        where = np.arange(first, work.start + len(work.tokens))
        page, place = np.divmod(where, self.config.page_size)
        return np.asarray(work.pages)[page], place

    def _result(self, found: StepOutputs, work: Work, row: int) -> Result:
        """Return what a request has asked for of its row."""
        number, experts = work.sampling.num_logprobs, None
        ids, logprobs = found.top_ids[row, :number], found.top_logprobs[row, :number]
        if work.sampling.has_experts:
            last = work.start + len(work.tokens) - 1
            experts = self._experts[self._places(work, last if work.index else 0)]
        return Result(
            token=int(found.tokens[row]),
            logprob=float(found.logprobs[row]),
            alternatives=tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)),
            experts=experts,
        )

    def _laid_out(self, params: Any) -> Any:
        """Return the parameters as a step reads them, so that it moves none."""
        if self._mesh is None:
            return jax.device_put(params)
        if self.execution.precision.weights != "floating":
            return params
        with self._in_mesh():
            return lay_out(self.model, params, rules=self.execution.axis_rules)

    def _in_mesh(self) -> Any:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


_EMPTY = Step(singles=(), pieces=())


def _no_limits(rows: int, vocab_size: int) -> Limits:
    """Return greedy sampling without filters for all rows."""
    return Limits(
        temperature=np.zeros(rows, np.float32),
        top_k=np.full(rows, vocab_size, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
    )


def _set_limits(limits: Any, row: int, sampling: Sampling) -> None:
    limits.temperature[row] = sampling.temperature
    if sampling.top_k:
        limits.top_k[row] = min(sampling.top_k, limits.top_k[row])
    limits.top_p[row], limits.min_p[row] = sampling.top_p, sampling.min_p


def _no_experts(model: ModelConfig, config: ExecutorConfig) -> np.ndarray:
    """Return the array for the experts of the tokens in all pages [P G L K].

    Its pages are those of the pools: what a page holds was computed with them, whichever request
    has computed it. Without `has_experts` it is empty.
    """
    layers = model.num_moe_layers if config.has_experts else 0
    routed, top_k = (1, 0) if model.moe is None else (model.moe.num_routed, model.moe.top_k)
    # E itself marks an empty slot.
    shape = (config.num_pages, config.page_size, layers, top_k)
    return np.zeros(shape, np.min_scalar_type(routed))
