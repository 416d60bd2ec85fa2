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
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.execution import ExecutionConfig, ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing.replay import why_not_recorded
from jaxmoe.scaling.initialize import lay_out
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.drafting import ComputedStep, ComputedWork, guesses_of
from jaxmoe.serve.device.draw import draw_adjusted, no_adjustments, set_adjustments
from jaxmoe.serve.device.experts import PageExperts
from jaxmoe.serve.device.host import HostPages
from jaxmoe.serve.device.inputs import InputArrays, PlacedWork
from jaxmoe.serve.device.layers import apart, longest_loop, num_calls
from jaxmoe.serve.device.matchers import Matchers
from jaxmoe.serve.device.pages import initial_pools, why_not_served
from jaxmoe.serve.device.prompt import (
    PositionScores,
    make_scores,
    num_scored,
    scores_of,
    targets_of,
)
from jaxmoe.serve.device.rows import (
    asks_for_more,
    check_asked,
    result_with,
    wants_last_state,
    wants_states,
)
from jaxmoe.serve.device.step import StepInputs, StepOptions, StepOutputs, make_step
from jaxmoe.serve.device.transfers import Held, HeldPages, host_bytes, make_transfers, num_transfers
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.requests import Request, Result, Sampling
from jaxmoe.serve.step import EngineStep, Work
from sharding.mesh import MeshConfig


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a step, of which the executor has a program."""

    pieces: tuple[int, int]
    """Number and length of the pieces beside the single tokens."""
    context_length: int
    """Tokens of a sequence that attention reads."""
    seconds: float = 0.0
    """Time of compilation."""


@dataclasses.dataclass(eq=False, slots=True)
class LaunchedStep:
    """A step that a device computes, or has computed."""

    placed: list[PlacedWork]
    """Its works, and their places."""
    outputs: StepOutputs
    """Arrays that are fetched."""
    scores: PositionScores | None
    """Scores of prompts; None where no request asks for them."""
    hidden: Any
    """States of its tokens on the device, for what drafts; None where nothing does."""
    shape: StepShape
    """Shape that was computed."""
    results: dict[int, Result] | None = None
    """Results by sequence, once they are collected."""


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
        adapters: tuple[str, ...] = (),
    ):
        """Allocate the pages and compile all programs.

        Args:
            model: Config of the model.
            params: Its parameters, laid out on the mesh, or on one device, which then computes.
            router_state: State of the routers, stacked over MoE layers; fresh when None.
            config: Sizes; defaults when None.
            execution: How the model is computed.
            mesh: Mesh of `sharding.make_mesh` with tensor and expert axes; None for one device.
            adapters: Names of the adapters that `jaxmoe.adapters.together` has put into the
                parameters, in its order; a request names one of them, or none.

        Raises:
            ValueError: The model cannot be served, or its experts cannot be recorded as
                `config.has_experts` asks, or the mesh has other axes, or a kernel cannot run.
        """
        self.model, self.config = model, config or ExecutorConfig()
        reason = why_not_served(model, execution or ExecutionConfig(), mesh)
        if reason is None and self.config.has_experts:
            reason = why_not_recorded(model)
        if reason is not None:
            raise ValueError(reason)
        self.adapters, self.execution = adapters, ServedConfig.of(execution or ExecutionConfig())
        self.execution.implementations.prepare_once(mesh)
        self._is_apart = num_calls(model) <= self.config.layers_apart
        if self._is_apart:
            self.execution = dataclasses.replace(self.execution, unroll=longest_loop(model))
        self._guesses = guesses_of(model, self.execution, self.config, adapters)
        compiled = self.config if self._guesses is None else self._guesses.compiled
        self._most_rows = compiled.shapes.most_rows
        self._mesh = mesh
        self._router_state = router_state
        self._params = self._laid_out(params)
        options = StepOptions(num_top=self.config.num_logprobs, has_experts=self.config.has_experts)
        self._arrays = InputArrays(compiled, model.vocab_size, adapters)
        self._step = make_step(model, self.execution, options)
        self._score = make_scores(model, self.execution, self.config.num_logprobs)
        self.moved_bytes = 0
        """Bytes of pages that went to host memory and back, for swaps and moves."""
        self.num_transfers = 0
        """Calls that moved them."""
        self._move = make_transfers(self.execution)
        self.reset()
        self.programs = tuple(self._compile(shape) for shape in self._shapes())
        """Shapes whose programs are compiled."""

    def load(self, params: Any, router_state: Any = None) -> None:
        """Go on with other parameters of the same model; called between requests.

        Pages keep what they hold: requests that shall not begin with pages of the earlier
        parameters have another `salt`.

        Args:
            params: Parameters, laid out as those that the executor was made with.
            router_state: State of the routers; fresh when None.
        """
        self._params = None  # its memory is free for the others
        self._params = self._laid_out(params)
        self._router_state = router_state

    @property
    def params(self) -> Any:
        """Parameters as a step reads them, for another executor on the same device too."""
        return self._params

    def reset(self) -> None:
        """Allocate empty pages, as at the start and after a step that failed."""
        self._host = HostPages()
        self._matchers = Matchers(self._most_rows)
        self._uncollected = list[LaunchedStep]()
        self._rows: dict[int, int] = {}
        self._load: np.ndarray | None = None
        size = self.config.num_pages, self.config.page_size
        self._experts = PageExperts(self.model, *size, is_kept=self.config.has_experts)
        with self._in_mesh():
            self._pools = initial_pools(self.model, self.execution, pages=size[0], size=size[1])
            if self._guesses is not None:
                self._guesses.forget()
                self._pools |= self._guesses.drafter.initial_pools(pages=size[0], size=size[1])
            self._drawn: Any = self._no_tokens()

    @property
    def mesh(self) -> MeshConfig:
        """Sizes of the mesh; all 1 on one device."""
        return MeshConfig() if self._mesh is None else MeshConfig(**dict(self._mesh.shape))

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages on all devices."""
        return sum(part.nbytes for part in jax.tree.leaves(self._pools))

    @property
    def host_bytes(self) -> int:
        """Bytes of keys and values in host memory, for swapped sequences and kept copies."""
        return self._host.nbytes

    @property
    def compile_seconds(self) -> float:
        """Time of compilation of all programs."""
        return sum(shape.seconds for shape in self.programs)

    def run(self, step: EngineStep) -> dict[int, Result]:
        """Compute a step, and return the tokens of the sequences that draw one.

        Args:
            step: Work with its pages taken.

        Returns:
            Results by sequence; those of pieces of a prompt have its scores and states alone, where
            the request asks for them.
        """
        return self.collect(self.launch(step))

    def launch(self, step: EngineStep) -> LaunchedStep:
        """Let the device compute a step, behind those that it computes.

        Tokens that are pending go from the step before to this one on the device.

        Args:
            step: Work with its pages taken.
        """
        with self._in_mesh():
            self._transfer(step)
            step = step if self._guesses is None else self._guesses.added_to(step)
            pieces = self.config.shapes.fitting([len(work.tokens) for work in step.pieces])
            assert pieces is not None  # `check` has compared the plan with the shapes
            longest = max((work.start + len(work.tokens) for work in step.works), default=0)
            length = next(n for n in self.config.context_lengths if n >= longest)
            shape = StepShape(pieces, length)
            inputs, placed = self._inputs(step, shape)
            outputs, self._pools = self._step(self._params, self._router_state, self._pools, inputs)
            scores = self._scores(outputs, placed)
            outputs = self._drawn_again(outputs, inputs, placed)
            self._drawn = outputs.tokens
            self._rows = {work.id: row for work, row, _ in placed if work.draws}
            hidden = None if self._guesses is None else outputs.hidden
            outputs = outputs._replace(
                logits=None,
                hidden=outputs.hidden if any(map(wants_states, step.works)) else None,
                last_hidden=outputs.last_hidden if any(map(wants_last_state, step.works)) else None,
            )
            for array in jax.tree.leaves((outputs, scores)):
                array.copy_to_host_async()
        launched = LaunchedStep(placed, outputs, scores, hidden, shape)
        self._uncollected.append(launched)
        return launched

    def collect(self, launched: LaunchedStep) -> dict[int, Result]:
        """Wait for a step, and return its results as `run` does.

        Args:
            launched: Step of `launch`.
        """
        while launched.results is None:
            step = self._uncollected.pop(0)
            step.results = self._fetch(step)
        return launched.results

    def _collect_all(self) -> None:
        """Wait for all steps, before what they leave in host memory is read or moved."""
        if self._uncollected:
            self.collect(self._uncollected[-1])

    def _fetch(self, launched: LaunchedStep) -> dict[int, Result]:
        """Return the results of a step whose predecessors were fetched."""
        fetched, scores = jax.device_get((launched.outputs, launched.scores))
        if fetched.load is not None:
            self._load = fetched.load + (0 if self._load is None else self._load)
        if fetched.experts is not None:
            for work, _, first in launched.placed:
                self._experts.write(work, fetched.experts[:, first : first + len(work.tokens)])
        tokens = fetched.tokens.tolist()
        logprobs = fetched.logprobs.tolist()
        results: list[Result | None] = []
        for work, row, first in launched.placed:
            prompt = scores_of(scores, work, first)
            states = None
            if wants_states(work):
                states = fetched.hidden[0, first : first + len(work.tokens)]
            if work.draws:
                result = Result(tokens[row], logprobs[row], prompt=prompt, states=states)
                if asks_for_more(work):
                    experts = self._experts.read(work)
                    result = result_with(result, fetched, work, row, experts)
                    result = self._matchers.ending(work, result)
                results.append(result)
            else:
                is_read = work.reads_prompt
                results.append(Result(-1, prompt=prompt, states=states) if is_read else None)
        if self._guesses is None:
            pairs = zip(launched.placed, results, strict=True)
            return {place.work.id: result for place, result in pairs if result is not None}
        by_sequence, works = self._guesses.checked(launched.placed, results)
        self._guess(launched.hidden, works, launched.shape)
        return by_sequence

    def _guess(self, hidden: Any, works: Sequence[ComputedWork], shape: StepShape) -> None:
        """Let the device guess the tokens behind some works."""
        assert self._guesses is not None  # the caller has looked
        step = ComputedStep(works, hidden, shape.pieces, shape.context_length)
        with self._in_mesh():
            arguments = (self._params, self._router_state, self._pools, step)
            guesses, self._pools = self._guesses.drafter.guess(*arguments)
        self._guesses.remember(works, guesses)

    def _scores(self, outputs: StepOutputs, placed: Sequence[PlacedWork]) -> PositionScores | None:
        """Return the scores behind each position; None where no request asks for them."""
        assert outputs.hidden is not None  # as `make_step` returns it
        if not any(num_scored(place.work) for place in placed):
            return None
        targets = np.zeros(outputs.hidden.shape[1], np.int32)
        for work, _, first in placed:
            targets[first : first + num_scored(work)] = targets_of(work)
        return self._score(self._params, outputs.hidden, targets)

    def _drawn_again(
        self, outputs: StepOutputs, inputs: StepInputs, placed: Sequence[PlacedWork]
    ) -> StepOutputs:
        """Return the outputs with the tokens of requests that change their logits.

        The mask of a grammar needs the token of the step before, which ends while the device has
        this step to compute.
        """
        adjusted = [
            place
            for place in placed
            if place.work.draws and place.work.sampling.changes_logits(place.work.index)
        ]
        if not adjusted:
            return outputs
        num_rows = len(inputs.last)
        longest = self.config.context_lengths[-1]
        adjustments = no_adjustments(num_rows, longest, self.model.vocab_size)
        is_adjusted = np.zeros(num_rows, bool)
        for work, row, _ in adjusted:
            source = int(inputs.sources[inputs.last[row]])
            if work.sampling.grammar is not None and source >= 0:
                self._collect_all()
            set_adjustments(adjustments, row, work, mask=self._matchers.mask(work), source=source)
            is_adjusted[row] = True
        tokens, logprobs = draw_adjusted(
            outputs.logits,
            inputs.seeds,
            inputs.indices,
            inputs.limits,
            adjustments,
            inputs.drawn,
            is_adjusted,
            outputs.tokens,
        )
        return outputs._replace(tokens=tokens, logprobs=logprobs)

    def read_pages(self, pages: Sequence[int]) -> HeldPages:
        """Return the content of some pages, in host memory.

        Args:
            pages: Pages of the pool; at least one.
        """
        self._collect_all()
        with self._in_mesh():
            pools = self._move.to_host(self._pools, pages)
        self._count(pools, pages)
        return HeldPages(pools, self._experts.take(pages))

    def write_pages(self, pages: Sequence[int], host_pages: HeldPages) -> None:
        """Write what an executor of the same model has read.

        Args:
            pages: Pages of the pool.
            host_pages: Their content.
        """
        self._collect_all()
        with self._in_mesh():
            self._pools = self._move.from_host(self._pools, pages, host_pages.pools)
        self._experts.put(pages, host_pages.experts)
        self._count(host_pages.pools, pages)

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
            steps_ahead=int(self._guesses is None),
            tells_history=self._guesses is not None,
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
        check_asked(request, self.config, self.model.vocab_size, self.adapters)

    def temp_bytes(self, shape: StepShape) -> int:
        """Return the bytes of temporaries of the program of a shape, as its compiler plans them.

        Args:
            shape: One of `programs`.
        """
        with self._in_mesh():
            inputs, _ = self._inputs(_EMPTY, shape)
            arguments = (self._params, self._router_state, self._pools, inputs)
            analysis: Any = self._step.lower(*arguments).compile().memory_analysis()  # pyright: ignore
        return analysis.temp_size_in_bytes

    def _shapes(self) -> Iterator[StepShape]:
        pieces = ((0, 0), *self.config.shapes.pieces)
        for piece_shape, length in itertools.product(pieces, self.config.context_lengths):
            yield StepShape(piece_shape, length)

    def _compile(self, shape: StepShape) -> StepShape:
        """Compile the program of a shape by computing padding alone."""
        start_time = time.perf_counter()
        with self._in_mesh():
            inputs, _ = self._inputs(_EMPTY, shape)
            outputs, self._pools = self._step(self._params, self._router_state, self._pools, inputs)
            everywhere = Sampling(logit_bias=((0, 0.0),))
            empty = Work(0, (), 0, (), True, 0, everywhere)
            outputs = self._drawn_again(outputs, inputs, [PlacedWork(empty, 0, 0)])
            targets = np.zeros(len(inputs.tokens), np.int32)
            scores = self._score(self._params, outputs.hidden, targets)
            jax.block_until_ready((outputs, scores))
            self._drawn = outputs.tokens
        if self._guesses is not None:
            self._guess(outputs.hidden, [], shape)
        return dataclasses.replace(shape, seconds=time.perf_counter() - start_time)

    def _transfer(self, step: EngineStep) -> None:
        """Move pages before the work: on the device, to host memory, and back."""
        if step.copies or step.out or step.back:
            self._collect_all()
        if step.copies:
            self._pools = self._move.copy(self._pools, step.copies)
            self._experts.copy(step.copies)
        for transfer in step.out:
            self._host.out(transfer, self.read_pages)
        for transfer in step.back:
            self._host.back(transfer, self.write_pages)
        for number in step.dropped:
            self._host.drop(number)

    def _count(self, host_arrays: Held, pages: Sequence[int]) -> None:
        self.moved_bytes += host_bytes(host_arrays)
        self.num_transfers += num_transfers(len(pages))

    def _inputs(self, step: EngineStep, shape: StepShape) -> tuple[StepInputs, list[PlacedWork]]:
        """Return the arrays of a step, and where its works lie in them."""
        return self._arrays.of(
            step, shape.pieces, shape.context_length, drawn=self._drawn, rows=self._rows
        )

    def _no_tokens(self) -> Any:
        """Return what a step reads that follows none, laid out as the tokens of a step."""
        tokens = jnp.zeros(self._most_rows, jnp.int32)
        return self.execution.placement.place(tokens, (None,))

    def _laid_out(self, params: Any) -> Any:
        """Return the parameters as a step reads them, so that it moves none."""
        if self._mesh is None:
            placed = jax.device_put(apart(self.model, params) if self._is_apart else params)
            self._device = next(iter(jax.tree.leaves(placed)[0].devices()))
            return placed
        with self._in_mesh():
            if self.execution.precision.weights == "floating":
                params = lay_out(self.model, params, rules=self.execution.axis_rules)
            return apart(self.model, params) if self._is_apart else params

    def _in_mesh(self) -> Any:
        """Compute on the mesh, or on the device that has the parameters."""
        if self._mesh is not None:
            return jax.set_mesh(self._mesh)
        if self._device == jax.devices()[0]:
            return contextlib.nullcontext()
        return jax.default_device(self._device)


_EMPTY = EngineStep(singles=(), pieces=())
