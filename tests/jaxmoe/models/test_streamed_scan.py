# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers streamed from host memory against layers on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.layers.records import Stream, TokenInputs
from jaxmoe.layers.residual import LadderResidualConfig
from jaxmoe.models.streamed_scan import stream_layers
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import init_params
from jaxmoe.training.host_arrays import layers_to_host
from sharding import MeshConfig
from tests.support.models import FULL, tokens_for
from tests.support.tolerances import assert_close
from tests.support.tpus import described_tpus

MODEL = dataclasses.replace(FULL, num_layers=4, residual=LadderResidualConfig())
HOST = {"offload": OffloadConfig(parameters="host")}


def loss_and_gradients(execution, params):
    tokens, _ = tokens_for(MODEL)

    def loss(params):
        output = Transformer(MODEL, execution).apply({"params": params}, tokens, train=True)
        nll = jnp.mean(jax.nn.logsumexp(output.logits, axis=-1) ** 2)
        return nll + sum(output.losses.values()), output.statistics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("remat", ["full", "offload"])
def test_streamed_layers_have_the_loss_and_gradients_of_others(remat):
    """With a dense layer, routed layers and a residual of three arrays."""
    params = init_params(MODEL, jax.random.key(0))
    names = {scan.name for scan in MODEL.scans}
    wanted = loss_and_gradients(ExecutionConfig(remat="full"), params)
    execution = ExecutionConfig(remat=remat, **HOST)
    found = loss_and_gradients(execution, layers_to_host(params, names))
    kinds = {
        name: {leaf.sharding.memory_kind for leaf in jax.tree.leaves(module)}
        for name, module in found[1].items()
    }
    assert {name for name, kind in kinds.items() if kind == {"pinned_host"}} == names
    assert_close(found, wanted, "matmul")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"remat": "none"}, "execution.remat=none keeps values"),
        ({"remat_dense": "dots"}, "execution.remat_dense=dots keeps values"),
        ({"mesh": MeshConfig(stage=2)}, "execution.mesh.stage=2"),
        ({"rules": "zero1"}, "set execution.rules to data_parallel or fully_sharded"),
        ({"telemetry": "detailed"}, "set execution.telemetry to brief"),
    ],
)
def test_what_needs_all_layers_on_the_device_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        ExecutionConfig(**HOST | {"remat": "full"} | fields)


LAYERS, WIDTH, TOKENS, MIB = 16, 1024, 64, 2**20
LAYER = 2 * WIDTH * WIDTH * 4 / 4 / MIB


def compiled(mesh, length):
    """Gradients of a chain of two-matrix layers, for four described TPUs."""

    def layer(held, stream, own, tokens):
        hidden = jnp.einsum("bsd,df->bsf", stream.x, held["up"], out_sharding=P("data"))
        change = jnp.einsum(
            "bsf,fd->bsd", jax.nn.silu(hidden), held["down"], out_sharding=P("data")
        )
        return dataclasses.replace(stream, x=stream.x + change), None

    def loss(params, x):
        tokens = TokenInputs(token_mask=jnp.ones((), bool))
        stream, _ = stream_layers(layer, length)(params, Stream(x=x), None, tokens)
        return jnp.sum(stream.x**2)

    def shaped(shape, spec, kind=None):
        given = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=given)

    weight = shaped((length, WIDTH, WIDTH), P(None, "data"), "pinned_host")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(jax.grad(loss)).trace(
            {"up": weight, "down": weight}, shaped((4, TOKENS, WIDTH), P("data"))
        )
    return traced.lower().compile()


@pytest.mark.slow
def test_the_device_has_two_layers_and_the_next_arrives_beside_products(monkeypatch):
    devices = described_tpus(monkeypatch, "v5e:2x2")
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Explicit,))
    few, many = (compiled(mesh, length) for length in (LAYERS, 2 * LAYERS))
    sizes = [program.memory_analysis() for program in (few, many)]
    for length, size in zip((LAYERS, 2 * LAYERS), sizes, strict=True):
        assert size.argument_size_in_bytes / MIB < LAYER  # the stream
        assert size.host_argument_size_in_bytes / MIB == length * LAYER
        assert size.host_output_size_in_bytes / MIB == length * LAYER
    # Of the layers more, the inputs alone are on the device.
    more = (sizes[1].temp_size_in_bytes - sizes[0].temp_size_in_bytes) / MIB
    assert more <= LAYERS * TOKENS * WIDTH * 4 / MIB + 0.1
    bodies = [text for text in many.as_text().split("\n\n") if "dynamic-slice-done(" in text]
    loops = [text.splitlines() for text in bodies if not text.startswith("ENTRY")]
    assert len(loops) == 2  # forward and backward
    for lines in loops:
        starts = [i for i, line in enumerate(lines) if "dynamic-slice-start(" in line]
        ends = [i for i, line in enumerate(lines) if "dynamic-slice-done(" in line]
        between = lines[max(starts) : min(ends)]
        assert any("convolution" in line or "fusion(" in line for line in between)
