# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests state_space_dual on TPUs: both interpreters, lowering, and compilation for a topology."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import state_space_dual
from pallas_kernels.interpreter import interpret_kernels
from pallas_kernels.selective_scan.tpu import kernels
from tests.pallas_kernels.selective_scan.test_selective_scan import (
    IDS,
    Inputs,
    make_inputs,
    value_and_gradients,
)
from tests.support.tolerances import assert_close
from tests.support.tpus import described_tpus

OPERATION = "state_space_dual"
LONG = 300


def _ids(length):
    """Return borders within, at and between tiles, one row without one, padding on both sides."""
    ids = np.ones((2, length), np.int32)
    for border in (5, 70, 128, 260):
        ids[0, border:] += 1
    ids[1, :3], ids[1, length - 60 :] = 0, 0
    return jnp.asarray(ids)


@pytest.mark.parametrize(
    ("interpreter", "length", "dtype"),
    [
        ("values", LONG, "float32"),
        ("values", LONG, "bfloat16"),
        ("machine", 140, "float32"),
        pytest.param("machine", LONG, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_parity(interpreter, length, dtype):
    """Value and gradient of all inputs, over several tiles."""
    inputs, ids = make_inputs(OPERATION, length, dtype), _ids(length)
    with interpret_kernels(interpreter):
        actual = value_and_gradients(inputs, ids, operation=OPERATION, implementation="pallas_tpu")
    expected = value_and_gradients(inputs, ids, operation=OPERATION, implementation="reference")
    assert_close(actual, expected, "matmul" if dtype == "float32" else "end_to_end", dtype)


def test_heads_of_one_group_in_several_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "HEADS", 2)
    inputs = make_inputs(OPERATION)
    inputs = inputs._replace(b=inputs.b[:, :, :1], c=inputs.c[:, :, :1])
    *arrays, initial = inputs
    with interpret_kernels("values"):
        actual, expected = (
            state_space_dual(
                *arrays, initial=initial, segment_ids=jnp.asarray(IDS), implementation=name
            )
            for name in ("pallas_tpu", "reference")
        )
    assert_close(actual, expected, "matmul")


@pytest.mark.parametrize("length", [1, kernels.FEWEST - 1])
def test_short_rows_have_no_tile(length):
    """Their program is that of xla."""
    *arrays, initial = make_inputs(OPERATION, length)
    with interpret_kernels("values"):
        programs = [
            str(
                jax.make_jaxpr(
                    functools.partial(state_space_dual, initial=initial, implementation=name)
                )(*arrays)
            )
            for name in ("pallas_tpu", "xla")
        ]
    assert programs[0] == programs[1] and "pallas_call" not in programs[0]


def _loss(inputs, ids):
    *arrays, initial = inputs
    y, state = state_space_dual(*arrays, segment_ids=ids, initial=initial)
    return jnp.sum(jnp.square(y.astype(jnp.float32))) + jnp.sum(state)


def _shapes(sizes, dtype, **options):
    batch, length, heads, width, groups, numbers = sizes
    row, shape = (batch, length), functools.partial(jax.ShapeDtypeStruct, **options)
    group = shape((*row, groups, numbers), dtype)
    return Inputs(
        x=shape((*row, heads, width), dtype),
        dt=shape((*row, heads), jnp.float32),
        decay=shape((heads,), jnp.float32),
        b=group,
        c=group,
        initial=shape((batch, heads, width, numbers), jnp.float32),
    ), shape(row, jnp.int32)


def test_lowered_for_a_tpu():
    """Block shapes for a TPU are valid; libtpu is not needed."""
    device = AbstractDevice("TPU v5 lite", None, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        arrays = _shapes((2, 1000, 24, 64, 1, 128), "bfloat16")
        lowered = jax.jit(jax.value_and_grad(_loss)).trace(*arrays)
        text = lowered.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 1


@pytest.fixture
def one_tpu(monkeypatch):
    """Return a mesh of one described device."""
    devices = described_tpus(monkeypatch, "v5e:2x2")
    return Mesh(np.array(devices[:1]), ("x",), (AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    # B, S, N, H, M, P: Mamba-2 of 370M parameters, groups, narrow heads and states, float32.
    [
        ((1, 4096, 32, 64, 1, 128), "bfloat16"),
        ((2, 1000, 24, 64, 8, 128), "bfloat16"),
        ((1, 300, 6, 32, 2, 16), "bfloat16"),
        ((1, 1000, 16, 128, 1, 256), "float32"),
    ],
)
def test_compiled_for_a_tpu(one_tpu, sizes, dtype):
    """Both passes fit into the memory of a core; no state per token exists."""
    here = NamedSharding(one_tpu, P())
    arrays = _shapes(sizes, dtype, sharding=here)
    with jax.sharding.use_abstract_mesh(one_tpu.abstract_mesh):
        compiled = jax.jit(jax.value_and_grad(_loss)).lower(*arrays).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert f"({OPERATION})" in text
    assert memory.temp_size_in_bytes < sizes[1] * arrays[0].initial.size * 4
