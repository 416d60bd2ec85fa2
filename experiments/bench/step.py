# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a training step beside a peer, the limit of both, and the step's parts (`bench step`).

Both sides train a model in each precision. The limit is the step's floating-point operations at the
rate of a dense product of that precision, measured in the same run. The parts are measured one by
one, forward and backward, in the first precision, so that their sum differs a little from the
whole. Both sides begin with the same parameters and read the same batches. The losses are means of
the counted steps: with `--rounds 400 --share inf` they show whether a side or a precision costs
anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.measure import Timing, in_turns, matmul_rate, time_call, with_gradients
from experiments.bench.peer import TrainingData, write_training_data
from experiments.bench.side import SideProcess
from jaxmoe.checkpoint.huggingface import to_huggingface
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.records import RoutingInputs, TokenInputs
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.optim import adamw
from jaxmoe.precision import DtypeName
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState, init_state
from jaxmoe.training.step import make_train_step

BENCH_MODEL = ModelConfig(
    vocab_size=256,
    num_layers=4,
    embed_dim=256,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=64, qk_norm="full"),
    moe=MoEConfig(num_experts=16, top_k=2, expert_dim=512),
)
_LEARNING_RATE = 3e-4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchRunConfig:
    """Output directory of a benchmark."""

    directory: str | None = None
    """Directory of summary.json; runs/bench/<name> when None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerBenchConfig:
    """Sizes of one MoE layer that is measured alone."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory."""
    num_experts: int = 64
    """Number of routed experts, E."""
    top_k: int = 8
    """Experts per token, K."""
    width: int = 512
    """Width of a token, D."""
    rounds: int = 5
    """Counted runs per measurement."""

    def __post_init__(self):
        for field in ("num_experts", "top_k", "width", "rounds"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBenchConfig:
    """Steps of training beside those of a peer."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory."""
    model: ModelConfig = BENCH_MODEL
    """Model to train, or to adapt."""
    batch_size: int
    """Sequences per step."""
    sequence_length: int
    """Tokens of a sequence."""
    warm_up: int
    """Steps before the counted ones: a fresh router loads its experts unevenly."""
    rounds: int = 10
    """Counted steps of each side."""
    peer_python: str | None = None
    """Interpreter of the peer, of an environment with the extra hf; this one when None."""
    share: float = 120.0
    """Seconds of all steps of one side in one precision; a slower one ends early, and says so."""

    def __post_init__(self):
        if not self.share > 0:
            raise ValueError(f"share={self.share} must be a positive number of seconds")
        for field in ("batch_size", "sequence_length", "rounds"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.warm_up < 0:
            raise ValueError(f"warm_up={self.warm_up} must be at least 0")
        if self.model.vocab_size < 256:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} must be at least 256: tokens are bytes"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBenchConfig(TrainingBenchConfig):
    """Training step of OLMoE's shape, small enough for two cores."""

    execution: ExecutionConfig = ExecutionConfig(unroll=4)
    """Execution of the model; its compute dtype is that of `precisions`."""
    precisions: tuple[DtypeName, ...] = ("float32", "bfloat16")
    """Dtypes of products to train in, on both sides."""
    batch_size: int = 8
    """Sequences per step."""
    sequence_length: int = 512
    """Tokens of a sequence."""
    warm_up: int = 20
    """Steps before the counted ones: a fresh router loads its experts unevenly."""
    peer: Literal["transformers", "none"] = "transformers"
    """Peer: OLMoE in transformers and PyTorch (extra hf), or none."""

    def __post_init__(self):
        TrainingBenchConfig.__post_init__(self)
        if not self.precisions or len(set(self.precisions)) != len(self.precisions):
            raise ValueError(
                f"precisions={self.precisions} must name each dtype once, and at least one"
            )
        if self.model.moe is None:
            raise ValueError("model.moe:none has no peer: the step is that of a mixture of experts")


def bench_step(config: StepBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json."""
    model = config.model
    moe = config.model.moe
    assert moe is not None
    tokens = config.batch_size * config.sequence_length
    flops = flops_per_token(model, parameter_table(model), config.sequence_length) * tokens
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        steps = config.warm_up + config.rounds
        write_training_data(f"{place}/data.npy", steps, config.batch_size, config.sequence_length)
        # First, so that a peer that does not start is reported before the compile.
        peer = _PeerProcess(config, place) if config.peer != "none" else None
        if peer is not None:
            stack.callback(peer.close)
        data = TrainingData(f"{place}/data.npy")
        ours = {dtype: _OurStep(config, dtype, data) for dtype in config.precisions}
        rates = {dtype: matmul_rate(jnp.dtype(dtype)) for dtype in config.precisions}
        candidates: dict[str, Callable[[], float]] = {}
        facts: dict[str, Any] = {} if peer is None else dict(peer.facts)
        for dtype, mine in ours.items():
            candidates[f"jaxmoe {dtype}"] = mine.step
            if peer is not None:
                candidates[f"{config.peer} {dtype}"] = partial(peer.step, dtype)
        if peer is not None:
            facts["matmul_flops_per_second"] = {
                dtype: peer.ask(f"rate {dtype}") for dtype in config.precisions
            }
        timings = in_turns(
            candidates, rounds=config.rounds, warm_up=config.warm_up, share=config.share
        )
    losses = {f"jaxmoe {dtype}": mine.losses for dtype, mine in ours.items()}
    if peer is not None:
        losses |= {
            f"{config.peer} {dtype}": all_losses for dtype, all_losses in peer.losses.items()
        }
    limits = {dtype: flops / rate for dtype, rate in rates.items()}
    medians = {name: timing.median for name, timing in timings.items()}
    fastest = min(medians[f"jaxmoe {dtype}"] for dtype in ours)
    first = config.precisions[0]
    return {
        "flops": flops,
        "matmul_flops_per_second": rates,
        "limit_seconds": limits,
        "seconds": {name: _in_json(timing) for name, timing in timings.items()},
        "loss": {name: float(np.mean(all_[-config.rounds :])) for name, all_ in losses.items()},
        "times_the_peer": None if peer is None else _times_the_peer(config, medians),
        "fraction_of_limit": {d: limits[d] / medians[f"jaxmoe {d}"] for d in ours},
        "tokens_per_second": tokens / fastest,
        "compile_seconds": {dtype: mine.compile_seconds for dtype, mine in ours.items()},
        "temporary_bytes": {dtype: mine.temporary_bytes for dtype, mine in ours.items()},
        "max_violation": ours[first].max_violation,
        "peer": facts,
        "parts": _parts(config, ours[first], flops_rate=rates[first]),
    }


def _times_the_peer(config: StepBenchConfig, medians: dict[str, float]) -> dict[str, float]:
    """Return the peer's median over ours for each precision, and for the best of each side."""

    def of(side: str) -> dict[str, float]:
        seconds = {dtype: medians[f"{side} {dtype}"] for dtype in config.precisions}
        return seconds | {"best": min(seconds.values())}

    theirs = of(config.peer)
    return {name: theirs[name] / median for name, median in of("jaxmoe").items()}


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    lines = []
    for dtype, limit in summary["limit_seconds"].items():
        rate = summary["matmul_flops_per_second"][dtype]
        lines.append(
            f"limit {dtype:16} {limit:8.3f} s   {summary['flops'] / 1e12:.3f} TFLOP at"
            f" {rate / 1e9:.0f} GFLOP/s (dense product, this run)"
        )
    for name, timing in summary["seconds"].items():
        limit = summary["limit_seconds"][name.split()[-1]]
        lines.append(
            f"{name:22} {timing['median']:8.3f} s   median of {timing['runs']}, best"
            f" {timing['best']:.3f}; {limit / timing['median']:.0%} of the limit; loss"
            f" {summary['loss'][name]:.3f}"
        )
    for dtype, times in (summary["times_the_peer"] or {}).items():
        label = "each at its best precision" if dtype == "best" else dtype
        lines.append(f"jaxmoe is {times:.2f} times as fast as the peer, {label}")
    for dtype, rate in summary["peer"].get("matmul_flops_per_second", {}).items():
        lines.append(f"the peer's dense product in {dtype} runs at {rate / 1e9:.0f} GFLOP/s")
    lines.append(f"fullest expert {1.0 + summary['max_violation']:8.2f} times its fair share")
    lines.append("parts, forward and backward, all layers:")
    for name, part in summary["parts"].items():
        at_limit = f"   limit {part['limit']:.3f}" if part["limit"] else ""
        lines.append(f"  {name:28} {part['seconds']:8.3f} s{at_limit}")
    return "\n".join(lines)


def _optimizer() -> optax.GradientTransformation:
    return adamw(_LEARNING_RATE, weight_decay=0.1)


def _initial_state(model: ModelConfig) -> TrainState:
    """Return the state that both sides begin with."""
    return init_state(model, _optimizer(), jax.random.key(0))


class _OurStep:
    """Training step of this library."""

    def __init__(self, config: StepBenchConfig, compute: DtypeName, data: TrainingData):
        self._data = data
        self._steps = itertools.count()
        precision = dataclasses.replace(config.execution.precision, compute=compute)
        self.execution = dataclasses.replace(config.execution, precision=precision)
        self.state = _initial_state(config.model)
        started = time.perf_counter()
        step = make_train_step(config.model, _optimizer(), execution=self.execution)
        self._step = step.lower(self.state, self._data.batch(0)).compile()
        self.compile_seconds = time.perf_counter() - started
        memory = self._step.memory_analysis()
        self.temporary_bytes = None if memory is None else memory.temp_size_in_bytes
        self.max_violation = 0.0
        self.losses: list[float] = []

    def step(self) -> float:
        """Return the seconds of one step."""
        batch = self._batch()
        started = time.perf_counter()
        self.state, metrics = self._step(self.state, batch)
        jax.block_until_ready(self.state.params)
        elapsed = time.perf_counter() - started
        self.max_violation = float(metrics.router["max_violation_worst"])
        self.losses.append(float(metrics.loss))
        return elapsed

    def _batch(self) -> Batch:
        return self._data.batch(next(self._steps))


class _PeerProcess:
    """The peer in its own process, with our initial parameters.

    Args:
        config: Sizes.
        place: Directory with the batches, where the model is written.

    Raises:
        ValueError: It does not start.
        CheckpointError: The model is not the peer's.
    """

    def __init__(self, config: StepBenchConfig, place: str):
        to_huggingface(
            config.model,
            _initial_state(config.model).params,
            f"{place}/model",
            family="olmoe",
            max_length=config.sequence_length,
        )
        settings = {
            "model": f"{place}/model",
            "data": f"{place}/data.npy",
            "learning_rate": _LEARNING_RATE,
        }
        self._side = SideProcess(
            "experiments.bench.peer",
            settings,
            python=config.peer_python,
            needs="Install the extra hf (Python 3.11), or give --peer none",
            name="the peer (transformers)",
        )
        self.facts = self._side.facts
        self.ask = self._side.ask
        self.losses: dict[str, list[float]] = {dtype: [] for dtype in config.precisions}

    def step(self, dtype: str) -> float:
        """Return the seconds of one step in a precision."""
        seconds, loss = self.ask(f"step {dtype}")
        self.losses[dtype].append(loss)
        return seconds

    def close(self) -> None:
        """Stop the process."""
        self._side.close()


def _parts(
    config: StepBenchConfig, ours: _OurStep, *, flops_rate: float
) -> dict[str, dict[str, float | None]]:
    """Return attention, experts and optimiser of all layers, each measured alone."""
    model = config.model
    execution = ours.execution
    moe = config.model.moe
    state = ours.state
    assert moe is not None
    batch = config.batch_size
    length = config.sequence_length
    tokens = batch * length
    layers = model.num_layers
    stack = next(iter(model.stacks))
    layer = jax.tree.map(lambda leaf: leaf[0], state.params[stack.path])
    x = jax.random.normal(jax.random.key(1), (batch, length, model.embed_dim))
    mask = jnp.ones((batch, length), bool)

    def attend(params: Any, x: Any) -> Any:
        module = model.attention.build(model.context, execution)
        out, _ = module.apply({"params": params}, x, TokenInputs(token_mask=mask), None)
        return out

    def mix(params: Any, x: Any) -> Any:
        inputs = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={})
        out, _ = MoELayer(moe, model.context, execution, True).apply({"params": params}, x, inputs)
        return out

    optimizer = _optimizer()
    update = time_call(optimizer.update, state.params, state.opt_state, state.params)
    timings = in_turns(
        {
            "attention": time_call(with_gradients(attend), layer["attention"], x),
            "experts and their router": time_call(with_gradients(mix), layer["moe"], x),
            "AdamW": update,
        },
        rounds=6,
    )
    attention: Any = model.attention
    heads = attention.num_heads * attention.head_dim
    projections = model.embed_dim * (2 * heads + 2 * attention.num_kv_heads * attention.head_dim)
    flops = {
        "attention": 6.0 * tokens * projections + 12.0 * tokens * heads * length / 2,
        "experts and their router": 6.0
        * tokens
        * model.embed_dim
        * (3 * moe.top_k * moe.expert_dim + moe.num_experts),
    }
    return {
        name: {
            "seconds": timing.median * (layers if name in flops else 1),
            "limit": flops[name] * layers / flops_rate if name in flops else None,
        }
        for name, timing in timings.items()
    }


def _in_json(timing: Timing) -> dict[str, float]:
    return {"median": timing.median, "best": timing.best, "runs": len(timing.seconds)}
