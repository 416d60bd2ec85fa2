# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of an instance that fills rows, on one device: one program for each length.

All programs are compiled when the executor is made, by filling padding; serving compiles nothing.
Rows are held by the instance, and travel with each step: an executor has no state but its counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxmoe.contrib.diffusion.config import DiffusionSizes
from jaxmoe.contrib.diffusion.diffuse import Filled, NoisyRows, make_denoiser, reverse_step
from jaxmoe.contrib.diffusion.instance import FilledRow, RowWork
from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.sampling import Limits
from jaxmoe.serve.device.rows import no_limits, set_limits
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.requests import Request, check_numbers
from jaxmoe.serve.step import EngineStep


class RowInputs(NamedTuple):
    """Rows of a step; free ones are padding."""

    tokens: Int[Any, "R S"]
    """Ids; the mask where nothing is filled in, 0 for padding."""
    is_real: Bool[Any, "R S"]
    """False for padding."""
    seeds: Int[Any, " R"]
    done: Int[Any, " R"]
    num_steps: Int[Any, " R"]
    limits: Limits


class DiffusionExecutor:
    """Fills rows with one model; called by one thread at a time."""

    def __init__(
        self,
        model: ModelConfig,
        params: Any,
        router_state: Any = None,
        *,
        config: DiffusionSizes | None = None,
        execution: ExecutionConfig | None = None,
    ):
        """Compile all programs.

        Args:
            model: Config of a model trained by masked diffusion; its last id is the mask.
            params: Its parameters, on one device.
            router_state: State of the routers, stacked over MoE layers; fresh when None.
            config: Sizes; defaults when None.
            execution: How the model is computed.

        Raises:
            ValueError: The model cannot be served.
        """
        reason = why_not_filled(model, execution or ExecutionConfig())
        if reason is not None:
            raise ValueError(reason)
        self.model, self.config = model, config or DiffusionSizes()
        self._params = params
        self._router_state = router_state
        execution = WholeRowsConfig.of(execution or ExecutionConfig())
        self._step = make_rows_step(model, execution, self.config.budget)
        self._load: np.ndarray | None = None
        self.pool_bytes = 0
        """Bytes of pages on the device: none, as rows travel with each step."""
        start_time = time.perf_counter()
        for length in self.config.lengths:
            jax.block_until_ready(self._run(self._inputs((), length)))
        self.compile_seconds = time.perf_counter() - start_time
        """Time of compilation of all programs."""

    def facts(self, *, max_waiting: int) -> Facts:
        """Return the sizes of the instance: a row is its page.

        Args:
            max_waiting: Requests in the queue at most.
        """
        rows = self.config.rows
        length = self.config.lengths[-1]
        return Facts(
            num_pages=rows,
            page_size=length,
            max_running=rows,
            max_length=length,
            max_waiting=max_waiting,
            num_layers=self.model.num_layers,
            capabilities=frozenset({"rows"}),
        )

    def check(self, request: Request) -> None:
        """Refuse what a request asks for and the executor does not compute.

        Args:
            request: Request of a client.

        Raises:
            ValueError: An id outside the vocabulary or that of the mask, a seed out of range, an
                adapter, the most likely tokens, or experts.
        """
        check_numbers(request, self.model.vocab_size - 1)
        sampling = request.sampling
        if sampling.num_logprobs:
            raise ValueError(
                f"num_logprobs={sampling.num_logprobs}: a masked-diffusion model returns the"
                " log-probability of each token alone: set num_logprobs to 0"
            )
        if sampling.num_prompt_logprobs is not None:
            raise ValueError(
                "num_prompt_logprobs asks for the scores of a prompt, which a masked-diffusion"
                " model does not have: leave it out"
            )
        if sampling.changes_logits(0):
            raise ValueError(
                "penalties, logit_bias, min_tokens and grammars are of tokens that are written one"
                " after the other, and a masked-diffusion model fills them in in any order: leave"
                " them out"
            )
        if sampling.pooling is not None:
            raise ValueError(
                f"pooling={sampling.pooling!r} asks for hidden states, which a masked-diffusion"
                " model changes with each step: serve a model that writes from left to right"
            )
        if sampling.has_experts:
            raise ValueError(
                "has_experts asks for the chosen experts, which change with each step of a"
                " masked-diffusion model: leave it out"
            )
        if request.adapter:
            raise ValueError(
                f"adapter={request.adapter!r}: a masked-diffusion model is served without adapters:"
                " serve a run that is folded (jaxmoe checkpoint convert --fold True)"
            )

    def run(self, step: EngineStep) -> dict[int, FilledRow]:
        """Take each row of a step one step further.

        Args:
            step: Rows.
        """
        works: Any = step.singles  # as `RowsInstance.start` makes them
        length = next(n for n in self.config.lengths if n >= max(len(w.tokens) for w in works))
        inputs = self._inputs(works, length)
        fetched = jax.device_get(self._run(inputs))
        if fetched.about is not None:
            self._load = fetched.about + (0 if self._load is None else self._load)
        mask = self.model.vocab_size - 1
        rows = {}
        for work in works:
            row = work.pages[0]
            size = len(work.tokens)
            tokens = fetched.tokens[row, :size]
            rows[work.id] = FilledRow(tokens, tokens != mask, fetched.logprobs[row, :size])
        return rows

    def reset(self) -> None:
        """Go on after a step that failed: there is nothing to empty."""

    def expert_load(self) -> np.ndarray | None:
        """Return the tokens that each expert of each MoE layer has got [L E]; None before any."""
        return self._load

    def _run(self, inputs: RowInputs) -> Filled:
        return self._step(self._params, self._router_state, inputs)

    def _inputs(self, works: Sequence[RowWork], length: int) -> RowInputs:
        count = self.config.rows
        tokens = np.zeros((count, length), np.int32)
        is_real = np.zeros((count, length), bool)
        seeds, done = (np.zeros(count, np.int32) for _ in range(2))
        num_steps = np.ones(count, np.int32)
        limits = no_limits(count, self.model.vocab_size)
        for work in works:
            row = work.pages[0]
            size = len(work.tokens)
            tokens[row, :size] = np.where(work.is_filled, work.tokens, self.model.vocab_size - 1)
            is_real[row, :size] = True
            seeds[row], done[row], num_steps[row] = work.sampling.seed, work.done, work.num_steps
            set_limits(limits, row, work.sampling)
        return RowInputs(tokens, is_real, seeds, done, num_steps, limits)


@functools.lru_cache(maxsize=8)
def make_rows_step(model: ModelConfig, execution: ExecutionConfig, budget: int) -> Any:
    """Return the jitted step `(params, router_state, inputs) -> Filled`.

    Args:
        model: Config of the model.
        execution: How it is computed.
        budget: Positions whose logits are computed at a time.
    """

    def step(params: Any, router_state: Any, inputs: RowInputs) -> Filled:
        keys = jax.vmap(jax.random.key)(inputs.seeds)
        arguments = (inputs.done, inputs.num_steps, inputs.limits)
        rows = NoisyRows(inputs.tokens, inputs.is_real, keys, *arguments)
        denoise, head = make_denoiser(model, execution, params, router_state, inputs.is_real)
        return reverse_step(denoise, head, rows, mask_token=model.vocab_size - 1, budget=budget)

    return jax.jit(step)


def why_not_filled(model: ModelConfig, execution: ExecutionConfig) -> str | None:
    """Return why a model cannot be served by filling rows, and the way out; None if it can.

    Args:
        model: Config of the model.
        execution: How it is computed.
    """
    if model.attention.is_causal:
        return (
            "model.attention.is_causal=True: this model writes from left to right, and was not"
            " trained by masked diffusion: serve it with jaxmoe.serve.device.executor.ModelExecutor"
        )
    for name, size in execution.mesh.by_axis.items():
        if size > 1:
            return (
                f"execution.mesh.{name}={size}: a masked-diffusion model is served on one device:"
                " set it to 1"
            )
    if any(kind.feed_forward.keeps_order for kind in model.kinds):
        return (
            "model.moe.capacity drops tokens by the length of the row that is compiled, and answers"
            " would depend on it: set model.moe.capacity to None, or sample with"
            " jaxmoe.contrib.diffusion.diffuse"
        )
    return None
