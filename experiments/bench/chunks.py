# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures in how many chunks tokens should be sent to their experts (`bench chunks`).

It measures each operation of a MoE layer on parts of the tokens, fits its cost (alpha + beta n),
and reports the choice of the model in `sharding/expert_parallel/chunks.py`, beside the whole layer
measured with each number of chunks. Routing is even, as a trained router's should be. A CPU whose
devices are threads on the same cores shows that it runs, and nothing about overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from experiments.bench.measure import in_turns, time_call
from experiments.bench.step import LayerBenchConfig
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from sharding import MeshConfig, make_mesh
from sharding import axes as ax
from sharding.assignments import Assignments
from sharding.expert_parallel import AllToAllConfig, ExpertAxes, expert_parallel
from sharding.expert_parallel.chunks import (
    LayerCosts,
    bottleneck,
    choose_num_chunks,
    fit_cost,
    layer_seconds,
)
from sharding.expert_parallel.transport import Transport, exchange

PARTS = (1, 2, 4, 8)
"""Divisors of the tokens of a measurement."""

AXES = ExpertAxes(expert=(ax.EXPERT,), expert_tensor=(ax.TENSOR,))
TOKENS = PartitionSpec(AXES.all)
SHARED = PartitionSpec(AXES.expert)  # tokens after the all-gather over expert_tensor
WEIGHTS = {
    "gate_up": PartitionSpec(ax.EXPERT, None, None, ax.TENSOR),
    "down": PartitionSpec(ax.EXPERT, ax.TENSOR, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBenchConfig(LayerBenchConfig):
    """Operations of one MoE layer with experts on several devices."""

    expert: int = -1
    """Devices that share the experts; -1 takes all that expert_tensor leaves."""
    expert_tensor: int = 1
    """Devices that share the hidden units of each expert."""
    tokens: int = 4096
    """Tokens of each device, T."""
    expert_dim: int = 256
    """Hidden width of one expert, F."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of tokens and weights."""
    transport: Transport | None = None
    """Transport of the all_to_all dispatcher."""

    def __post_init__(self):
        LayerBenchConfig.__post_init__(self)
        for field in ("expert_tensor", "tokens", "expert_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.tokens % max(PARTS):
            raise ValueError(
                f"tokens={self.tokens} must be a multiple of {max(PARTS)}: parts are measured"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must not exceed num_experts={self.num_experts}")
        if self.expert_dim % self.expert_tensor:
            raise ValueError(
                f"expert_dim={self.expert_dim} must be divisible by"
                f" expert_tensor={self.expert_tensor}"
            )


def bench_chunks(config: ChunkBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json."""
    mesh = make_mesh(MeshConfig(expert=config.expert, tensor=config.expert_tensor))
    runs = {
        f"{name} {part}": run
        for part in PARTS
        for name, run in _operations(config, mesh, config.tokens // part).items()
    }
    names = list(dict.fromkeys(name.split()[0] for name in runs))
    runs |= {f"layer {number}": _layer(config, mesh, number) for number in PARTS}
    timings = in_turns(runs, rounds=config.rounds, warm_up=1)
    seconds = {name: timing.median for name, timing in timings.items()}
    amounts = [1 / part for part in PARTS]
    costs = LayerCosts(
        **{name: fit_cost(amounts, [seconds[f"{name} {part}"] for part in PARTS]) for name in names}
    )
    return {
        "devices": {"expert": mesh.shape[ax.EXPERT], "expert_tensor": mesh.shape[ax.TENSOR]},
        "costs": {name: dataclasses.asdict(getattr(costs, name)) for name in names},
        "rows": [
            {
                "chunks": number,
                "predicted_seconds": layer_seconds(costs, number),
                "bottleneck": bottleneck(costs, number),
                "measured_seconds": seconds[f"layer {number}"],
            }
            for number in PARTS
        ],
        "num_chunks": choose_num_chunks(costs, config.tokens),
    }


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    devices = summary["devices"]
    lines = [
        f"experts on {devices['expert']} devices, their hidden units on"
        f" {devices['expert_tensor']}; forward",
        *(
            f"{name:16}{cost['alpha'] * 1e3:9.3f} ms +{cost['beta'] * 1e3:9.3f} ms for all tokens"
            for name, cost in summary["costs"].items()
        ),
        "chunks   predicted    measured   waits for",
    ]
    for row in summary["rows"]:
        lines.append(
            f"{row['chunks']:6}{row['predicted_seconds'] * 1e3:9.3f} ms"
            f"{row['measured_seconds'] * 1e3:9.3f} ms   {row['bottleneck']}"
        )
    number = summary["num_chunks"]
    lines.append(f"forward and backward: --execution.dispatcher.num_chunks {number}")
    return "\n".join(lines)


def _operations(
    config: ChunkBenchConfig, mesh: Mesh, tokens: int
) -> dict[str, Callable[[], float]]:
    """Return each operation alone, on so many tokens of each device."""
    devices = mesh.shape[ax.EXPERT]
    tensor = mesh.shape[ax.TENSOR]
    shared = tokens * tensor
    width = config.width
    expert_ids = _even_ids(config, devices * shared)

    def send(x: Array, expert_ids: Array) -> Array:
        slots = expert_ids.reshape(-1)
        num_local = AXES.experts_held(config.num_experts)
        return exchange(
            jnp.repeat(x, config.top_k, axis=0),
            jnp.ones((slots.shape[0], 1), jnp.float32),
            slots,
            num_experts=config.num_experts,
            most=min(slots.shape[0], x.shape[0] * num_local),
            axes=AXES,
            transport=config.transport,
        ).rows

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(x, AXES.expert_tensor, tiled=True)

    def scatter(y: Array) -> Array:
        return jax.lax.psum_scatter(y, AXES.expert_tensor, scatter_dimension=0, tiled=True)

    def compute(x: Array, sizes: Array, weights: dict[str, Array]) -> Array:
        return apply_experts(weights, x, sizes)

    x = jnp.ones((devices * shared, width), config.dtype)
    # As many rows as arrive in total, device after device.
    rows = jnp.ones((devices * shared * config.top_k, width), config.dtype)
    sizes = jnp.bincount(expert_ids.reshape(-1), length=config.num_experts).astype(jnp.int32)
    operations = {
        "all_to_all": _run(mesh, send, (SHARED, SHARED), SHARED, x, expert_ids),
        "experts": _run(
            mesh, compute, (SHARED, SHARED, WEIGHTS), TOKENS, rows, sizes, _weights(config)
        ),
    }
    if tensor > 1:
        sums = jnp.ones((devices * tensor * shared, width), config.dtype)
        operations["all_gather"] = _run(mesh, gather, (TOKENS,), TOKENS, x)
        operations["reduce_scatter"] = _run(mesh, scatter, (TOKENS,), TOKENS, sums)
    return operations


def _layer(config: ChunkBenchConfig, mesh: Mesh, number: int) -> Callable[[], float]:
    """Send all tokens to their experts and back, in so many chunks."""
    tokens = config.tokens * mesh.size
    top_k = config.top_k
    dispatcher = AllToAllConfig(transport=config.transport, num_chunks=number)

    def layer(x: Array, expert_ids: Array, weights: dict[str, Array]) -> Array:
        assignments = Assignments(
            token_ids=jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), top_k),
            expert_ids=expert_ids.reshape(-1),
            gates=jnp.ones((expert_ids.size,), jnp.float32),
            top_k=top_k,
        )
        return expert_parallel(
            x,
            assignments,
            apply_experts,
            weights,
            num_experts=config.num_experts,
            config=dispatcher,
            axes=AXES,
        )[0]

    x = jnp.ones((tokens, config.width), config.dtype)
    specs = (TOKENS, TOKENS, WEIGHTS)
    return _run(mesh, layer, specs, TOKENS, x, _even_ids(config, tokens), _weights(config))


def _even_ids(config: ChunkBenchConfig, tokens: int) -> Array:
    """Return expert ids [T K] in rotation."""
    slots = jnp.arange(tokens * config.top_k, dtype=jnp.int32) % jnp.int32(config.num_experts)
    return slots.reshape(tokens, config.top_k)


def _weights(config: ChunkBenchConfig) -> dict[str, Array]:
    number = config.num_experts
    width = config.width
    hidden = config.expert_dim
    shapes = {"gate_up": (number, width, 2, hidden), "down": (number, hidden, width)}
    return {name: jnp.full(shape, 0.01, config.dtype) for name, shape in shapes.items()}


def _run(
    mesh: Mesh, function: Callable[..., Array], specs: Any, out: PartitionSpec, *arrays: Any
) -> Callable[[], float]:
    """Return a run of the function on every device, on arrays laid out for it."""
    placed = jax.tree.map(
        lambda spec, array: jax.device_put(array, NamedSharding(mesh, spec)), specs, arrays
    )
    region = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
    return time_call(region, *placed)
