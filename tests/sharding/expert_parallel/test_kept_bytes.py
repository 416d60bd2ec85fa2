# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a MoE layer keeps for its backward pass, from compiled programs of 4 and 8 layers.

2 T D + 4 A F bytes in bf16: the input and the hidden units of its experts, A = K T. Layers share
their weights, whose copies and gradients would count with each layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.planning.compilers.topologies import has_cuda_plugin, topology_devices
from jaxmoe.planning.hardware import parse_topology
from sharding.assignments import Assignments
from sharding.expert_parallel import ExpertAxes, LocalConfig, expert_parallel
from tests.support.tpus import described_tpus

T, K, E, D, F = 2048, 4, 8, 256, 256
FORMULA = 2 * T * D + 4 * K * T * F
DTYPES = {"cpu": jnp.float32, "tpu": jnp.bfloat16, "gpu": jnp.bfloat16}
NUMBERS = 12 * K * T
"""Gates, and the order of the rows in both directions."""


def temporaries(mesh: Mesh, num_layers: int) -> int:
    """Bytes of the temporaries of a gradient through layers in a loop."""

    def layer(x, weights, gates, expert_ids):
        assignments = Assignments(
            token_ids=jnp.repeat(jnp.arange(T, dtype=jnp.int32), K),
            expert_ids=expert_ids,
            gates=gates,
            top_k=K,
        )
        y, _ = expert_parallel(
            x,
            assignments,
            apply_experts,
            weights,
            num_experts=E,
            config=LocalConfig(),
            axes=ExpertAxes(),
        )
        return x + y

    def loss(x, weights, gates, expert_ids):
        def body(x, _):
            return layer(x, weights, gates, expert_ids), None

        y, _ = jax.lax.scan(body, x, length=num_layers)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    platform = mesh.devices.flat[0].platform
    dtype = DTYPES[platform]

    def like(*shape, dtype=dtype):
        placed = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    weights = {"gate_up": like(E, D, 2, F), "down": like(E, F, D)}
    numbers = (like(K * T, dtype=t) for t in (jnp.float32, jnp.int32))
    arguments = (like(T, D), weights, *numbers)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        language = "cuda" if platform == "gpu" else platform
        lowered = gradient.trace(*arguments).lower(lowering_platforms=(language,))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def kept(mesh: Mesh) -> float:
    """Bytes that a layer keeps."""
    return (temporaries(mesh, 8) - temporaries(mesh, 4)) / 4


def _mesh(device) -> Mesh:
    return Mesh(np.array([device]), ("x",), (AxisType.Auto,))


def test_on_a_cpu_a_layer_keeps_its_input_and_hidden_units():
    """In float32; the head of the layout has a sixteenth more rows."""
    assert 2 * FORMULA <= kept(_mesh(jax.devices()[0])) <= 1.07 * 2 * FORMULA + NUMBERS


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1"])
def test_on_a_tpu_a_layer_keeps_its_input_and_hidden_units(monkeypatch, chip):
    (device, *_) = described_tpus(monkeypatch, chip)
    assert FORMULA <= kept(_mesh(device)) <= 1.05 * FORMULA + NUMBERS


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_plugin(), reason="needs the CUDA plugin")
def test_on_a_described_gpu_a_layer_keeps_its_input_and_hidden_units():
    (device,) = topology_devices(parse_topology("gpu:h100:1"))
    assert FORMULA <= kept(_mesh(device)) <= 1.05 * FORMULA + NUMBERS
