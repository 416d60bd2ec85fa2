# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of each routing method beside plain top-k (`bench routers`).

Measured are `route` in training, the gate, the capacity, and the losses of the statistics, forward
and with the gradients of the parameters and the tokens; not the experts, the dispatch, or losses of
weights.
The limit is the router's matrix product at the rate measured in the same run: 2 T D E operations
forward, 6 T D E with its gradients.

All methods take turns; medians count. A method that does not fit these sizes is a row with the
reason.

Without a clock, rows of padding are counted: a grouped product computes whole tiles of M rows, so
top-k costs ceil(f_e / M) M rows for the load f_e of an expert. The table has, by number of experts
and tile, that padding over the rows of top-k, and what token rounding changes so that there is
none: assignments dropped and added over those of top-k, with loads of each sequence and of the
batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.bench.measure import in_turns, matmul_rate, time_call
from experiments.bench.step import LayerBenchConfig
from jaxmoe.configs import closest
from jaxmoe.models.config import MoEConfig
from jaxmoe.routing import (
    METHODS,
    Extent,
    RenormalizedGateConfig,
    RouterInputs,
    RouterOutput,
    SoftmaxTopKConfig,
    TokenRoundingConfig,
)
from jaxmoe.routing.balancers import of_statistics
from jaxmoe.routing.capacity import ADDED, RouterChoice
from sharding.assignments import Assignments
from sharding.expert_parallel.permute import loads

PLAIN = "plain top-k"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterBenchConfig(LayerBenchConfig):
    """Cost of each routing method beside plain top-k."""

    methods: tuple[str, ...] = ()
    """Names in jaxmoe.routing.METHODS; empty for all of them."""
    tokens: int = 16384
    """Tokens of a batch, T."""
    sequence_length: int = 2048
    """Tokens of one sequence, for methods that use whole sequences; divides tokens."""
    tiles: tuple[int, ...] = (64, 128, 256)
    """Rows of a tile, for the count of padding."""
    experts: tuple[int, ...] = (64, 128, 256)
    """Numbers of experts, for the count of padding; top_k of them per token."""

    def __post_init__(self):
        LayerBenchConfig.__post_init__(self)
        for field in ("tokens", "sequence_length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        for field, least in (("tiles", 1), ("experts", self.top_k)):
            if min(getattr(self, field), default=least) < least:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {least}")
        if self.tokens % self.sequence_length:
            raise ValueError(
                f"tokens={self.tokens} must be a multiple of sequence_length={self.sequence_length}"
            )
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(
                    f"methods: there is no method {name!r}{closest(name, METHODS)}\n"
                    f"methods: {', '.join(METHODS)}"
                )


def bench_routers(config: RouterBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json."""
    plain = MoEConfig(
        num_experts=config.num_experts,
        top_k=config.top_k,
        router=SoftmaxTopKConfig(),
        gate=RenormalizedGateConfig(),
        balancers=(),
    )
    forward = {PLAIN: _compile_programs(config, plain, False)}
    with_backward = {PLAIN: _compile_programs(config, plain, True)}
    refused = {}
    for name in config.methods or METHODS:
        try:
            moe = dataclasses.replace(plain, **METHODS[name].parts())
            forward[name] = _compile_programs(config, moe, False)
            with_backward[name] = _compile_programs(config, moe, True)
        except ValueError as error:
            refused[name] = str(error)
            forward.pop(name, None)
    rate = matmul_rate()
    timings = [in_turns(runs, rounds=config.rounds, warm_up=1) for runs in (forward, with_backward)]
    seconds = {name: [timing[name].median for timing in timings] for name in forward}
    flops = 2.0 * config.tokens * config.width * config.num_experts
    return {
        "matmul_flops_per_second": rate,
        "limit_seconds": {"forward": flops / rate, "with_gradients": 3.0 * flops / rate},
        "sizes": {
            "T": config.tokens,
            "E": config.num_experts,
            "K": config.top_k,
            "D": config.width,
        },
        "rows": [
            {
                "method": name,
                "forward_seconds": seconds[name][0],
                "seconds": seconds[name][1],
                "forward_ratio": seconds[name][0] / seconds[PLAIN][0],
                "ratio": seconds[name][1] / seconds[PLAIN][1],
            }
            for name in forward
        ],
        "refused": refused,
        "padding": [row for number in config.experts for row in count_padding(config, number)],
    }


def count_padding(config: RouterBenchConfig, num_experts: int) -> list[dict[str, Any]]:
    """Return the padding of top-k and what token rounding changes, a row for each tile.

    Args:
        config: Tokens, width, top_k and tiles.
        num_experts: E.
    """
    gate = RenormalizedGateConfig()
    moe = MoEConfig(num_experts=num_experts, top_k=config.top_k, gate=gate, balancers=())
    router = moe.router.build(num_experts=num_experts, top_k=config.top_k, embed_dim=config.width)
    params, state = router.init(jax.random.key(0))
    inputs = _inputs(config, moe)
    output = jax.jit(lambda inputs: router.route(params, state, inputs, train=True, key=None))(
        inputs
    )
    load = np.asarray(loads(output.selection.expert_ids, num_experts))
    rows = []
    for tile in config.tiles:
        padding = np.sum(-load % tile)
        row = {
            "num_experts": num_experts,
            "tile": tile,
            "even_load": config.tokens * config.top_k / num_experts,
            "padding": float(padding / load.sum()),
        }
        for scope in ("sequence", "batch"):
            capacity = TokenRoundingConfig(tile=tile, scope=scope)
            try:
                row[scope] = _changes(capacity, moe, output, inputs)
            except ValueError:  # a tile above the even load
                row[scope] = None
        rows.append(row)
    return rows


def _changes(
    capacity: TokenRoundingConfig, moe: MoEConfig, output: RouterOutput, inputs: RouterInputs
) -> dict[str, float]:
    """Return dropped, added and padding rows over those of the router's choice.

    Raises:
        ValueError: An even load is less than a tile.
    """
    assign = jax.jit(functools.partial(_assign, dataclasses.replace(moe, capacity=capacity)))
    rounded, extra = assign(output, inputs, None)
    load = np.asarray(loads(rounded.expert_ids, moe.num_experts))
    number = float(output.statistics.counts.sum())
    added = float(extra[ADDED])
    return {
        "dropped": (number + added - float(load.sum())) / number,
        "added": added / number,
        "padding": float(np.sum(-load % capacity.tile)) / number,
    }


def _assign(
    moe: MoEConfig, output: RouterOutput, inputs: RouterInputs, key: Array | None
) -> tuple[Assignments, dict[str, Array]]:
    """Return the assignments of a router's choice, and the statistics of the capacity."""
    gate = moe.gate.build()
    choice = RouterChoice(
        gate.assign(output.selection),
        output,
        inputs,
        gate,
        num_experts=moe.num_experts,
        num_free=moe.num_zero_computation,
        key=key,
    )
    return (choice.assignments, {}) if moe.capacity is None else moe.capacity.assign(choice)


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    sizes = " ".join(f"{name}={size}" for name, size in summary["sizes"].items())
    limit = summary["limit_seconds"]
    names = [row["method"] for row in summary["rows"]] + list(summary["refused"])
    wide = max(len("its matrix product"), *map(len, names))
    lines = [
        f"routing and gate, float32, {sizes}; dense product"
        f" {summary['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s",
        f"{'':{wide}}{'forward':>12}{'beside':>8}{'gradients too':>16}{'beside':>8}",
        f"{'its matrix product':{wide}}{limit['forward'] * 1e3:10.1f}ms{'':8}"
        f"{limit['with_gradients'] * 1e3:14.1f}ms",
    ]
    for row in summary["rows"]:
        lines.append(
            f"{row['method']:{wide}}{row['forward_seconds'] * 1e3:10.1f}ms"
            f"{row['forward_ratio']:7.2f}x{row['seconds'] * 1e3:14.1f}ms{row['ratio']:7.2f}x"
        )
    lines += [f"{name:{wide}}  refused: {why}" for name, why in summary["refused"].items()]
    return "\n".join([*lines, "", *_padding_in_words(summary["padding"])])


def _padding_in_words(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of padding."""
    lines = [
        "padding of whole tiles over the rows of top-k, and assignments that token rounding drops"
        " and adds instead",
        f"{'experts':>8}{'tile':>6}{'tiles an expert':>17}{'padding':>9}"
        f"{'by sequence':>20}{'by batch':>18}",
    ]

    def changes(row: dict[str, Any] | None) -> str:
        return "-" if row is None else f"-{row['dropped']:.1%} +{row['added']:.1%}"

    for row in rows:
        lines.append(
            f"{row['num_experts']:8}{row['tile']:6}{row['even_load'] / row['tile']:17.1f}"
            f"{row['padding']:9.1%}{changes(row['sequence']):>20}{changes(row['batch']):>18}"
        )
    return lines


def _compile_programs(
    config: RouterBenchConfig, moe: MoEConfig, has_gradients: bool
) -> Callable[[], float]:
    """Return a compiled run of one method, which returns its seconds."""
    router = moe.router.build(num_experts=moe.num_routed, top_k=moe.top_k, embed_dim=config.width)
    params, state = router.init(jax.random.key(0))
    key = jax.random.key(1)
    inputs = _inputs(config, moe)

    def value(params: Any, x: Array, state: Any, inputs: RouterInputs, key: Array) -> Any:
        inputs = dataclasses.replace(inputs, x=x)
        output = router.route(params, state, inputs, train=True, key=key)
        assignments, extra = _assign(moe, output, inputs, key)
        return {
            "gates": assignments.gates,
            "slots": output.slots,
            "losses": _losses(moe, output, inputs),
            "carry": output.carry,
        }, (assignments.token_ids, assignments.expert_ids, output.statistics, extra)

    def run(params: Any, x: Array, state: Any, inputs: RouterInputs, key: Array) -> Any:
        if not has_gradients:
            return value(params, x, state, inputs, key)
        out, pull, auxiliary = jax.vjp(
            lambda params, x: value(params, x, state, inputs, key), params, x, has_aux=True
        )
        return out, auxiliary, pull(jax.tree.map(jnp.ones_like, out))

    return time_call(run, params, inputs.x, state, inputs, key)


def _inputs(config: RouterBenchConfig, moe: MoEConfig) -> RouterInputs:
    """Return tokens without structure, with every input that a router may use."""
    tokens = config.tokens
    previous = None
    if moe.router.traits.carries_logits:
        previous = jnp.zeros((tokens, moe.num_routed), jnp.float32)
    return RouterInputs(
        x=jax.random.normal(jax.random.key(2), (tokens, config.width), jnp.float32),
        token_mask=jnp.ones(tokens, bool),
        segment_ids=jnp.ones(tokens, jnp.int32),
        previous_logits=previous,
        context={
            "tokens": jax.random.randint(jax.random.key(3), (tokens,), 0, 256, jnp.int32),
            "index": jnp.arange(tokens, dtype=jnp.int32),
            "layer": jnp.zeros((), jnp.int32),
            "mask_ratio": jnp.full(tokens, 0.5, jnp.float32),
        },
        extent=Extent(sequence_length=config.sequence_length),
    )


def _losses(moe: MoEConfig, output: Any, inputs: RouterInputs) -> list[Array]:
    """Return the losses of the balancers that use statistics, for one layer."""
    extra = output.statistics.extra
    balancers = of_statistics(moe.balancers)
    for balancer in balancers:
        extra = extra | balancer.observe(output, inputs)
    statistics = dataclasses.replace(output.statistics, extra=extra)
    stacked = jax.tree.map(lambda leaf: leaf[None], statistics)
    num_free = moe.num_zero_computation
    return [balancer.loss(stacked, num_free=num_free) for balancer in balancers]
