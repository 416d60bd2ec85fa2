# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Integers in words of 32 bits are read as the packing of each format defines them.

The oracle packs known integers bit by bit, and multiplies them value by value.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import read_huggingface
from jaxmoe.checkpoint.huggingface.files import Planned, write_tensors
from jaxmoe.checkpoint.huggingface.stored_weights import decode_weights
from jaxmoe.checkpoint.manifest import CheckpointError
from tests.support import huggingface_models

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(integers, bits, order=None):
    """Return the words of unsigned integers [m, k] along the last dimension, padded with 0."""
    number = 32 // bits
    rows, columns = integers.shape
    words = np.zeros((rows, -(-columns // number)), np.uint32)
    for row in range(rows):
        for column in range(columns):
            place = column % number if order is None else order.index(column % number)
            value = np.uint32(integers[row, column]) << np.uint32(bits * place)
            words[row, column // number] |= value
    return words.view(np.int32)


def settings(method, **fields):
    return {"quantization_config": {"quant_method": method, **fields}}


def scheme(bits=4, **fields):
    weights = {"num_bits": bits, "type": "int", **fields}
    group = {"targets": ["Linear"], "weights": weights}
    return settings("compressed-tensors", format="pack-quantized", config_groups={"group_0": group})


def compressed(weight, bits=4, group=4, *, is_symmetric=True, order=None):
    """Return stored tensors near a weight, and what they stand for."""
    outs, ins = weight.shape
    places = np.arange(ins) // group if order is None else order
    groups = places.max() + 1
    rng = np.random.default_rng(5)
    scales = rng.uniform(0.1, 0.3, (outs, groups)).astype(jnp.bfloat16)
    top = 2 ** (bits - 1)
    zeros = rng.integers(-3, 4, (outs, groups)) * (not is_symmetric)
    wide = scales.astype(np.float32)
    values = np.clip(np.round(weight / wide[:, places]) + zeros[:, places], -top, top - 1)
    tensors = {
        "weight_packed": packed(values.astype(int) + top, bits),
        "weight_scale": scales,
        "weight_shape": np.array([outs, ins], np.int64),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(packed((zeros + top).T, bits).T)
    if order is not None:
        tensors["weight_g_idx"] = order.astype(np.int32)
    result = np.empty(weight.shape, np.float32)
    for out in range(outs):
        for column in range(ins):
            point = zeros[out, places[column]]
            result[out, column] = (values[out, column] - point) * wide[out, places[column]]
    return tensors, result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("group", [4, 12])
def test_compressed_tensors_equal_a_loop(bits, is_symmetric, group):
    weight = np.random.default_rng(0).normal(size=(10, 12))
    tensors, values = compressed(weight, bits, group, is_symmetric=is_symmetric)
    stored = {f"a.b.{name}": tensor for name, tensor in tensors.items()}
    decoded = decode_weights(scheme(bits), stored | {"a.bias": np.ones(3)})
    assert decoded.keys() == {"a.b.weight", "a.bias"}
    assert decoded["a.b.weight"].shape == (10, 12)
    np.testing.assert_array_equal(np.asarray(decoded["a.b.weight"]), values)


def test_groups_of_compressed_tensors_may_be_in_any_order():
    weight = np.random.default_rng(1).normal(size=(3, 12))
    order = np.random.default_rng(2).permutation(np.arange(12) // 4)
    tensors, values = compressed(weight, order=order)
    decoded = decode_weights(scheme(), {f"a.{name}": x for name, x in tensors.items()})
    np.testing.assert_array_equal(np.asarray(decoded["a.weight"]), values)
    tensors["weight_g_idx"] = np.full(12, -1, np.int32)  # stored, and unused
    tensors, values = tensors | {}, compressed(weight)[1]
    plain = decode_weights(scheme(), {f"a.{name}": x for name, x in tensors.items()})
    assert np.asarray(plain["a.weight"]).shape == values.shape


@pytest.mark.parametrize("group", [4, -1])
def test_awq_equals_a_loop(group):
    rng = np.random.default_rng(3)
    ins, outs = 12, 16
    size = ins if group == -1 else group
    values = rng.integers(16, size=(ins, outs))
    zeros = rng.integers(16, size=(ins // size, outs))
    scales = rng.uniform(0.1, 0.3, zeros.shape).astype(np.float16)
    stored = {
        "a.qweight": packed(values, 4, AWQ_ORDER),
        "a.qzeros": packed(zeros, 4, AWQ_ORDER),
        "a.scales": scales,
    }
    fields = settings("awq", bits=4, group_size=group, version="gemm", zero_point=True)
    decoded = np.asarray(decode_weights(fields, stored)["a.weight"])
    assert decoded.shape == (outs, ins)
    for row in range(ins):
        for out in range(outs):
            step = np.float32(values[row, out] - zeros[row // size, out])
            assert decoded[out, row] == step * np.float32(scales[row // size, out])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_gptq_equals_a_loop(bits, form, is_ordered):
    rng = np.random.default_rng(4)
    ins, outs = 24, 16
    values = rng.integers(2**bits, size=(ins, outs))
    zeros = rng.integers(2**bits, size=(3, outs))
    scales = rng.uniform(0.1, 0.3, zeros.shape).astype(np.float16)
    places = np.arange(ins) // 8
    stored_zeros = (zeros - (form == "gptq")) % 2**bits
    stored = {
        "a.qweight": np.ascontiguousarray(packed(values.T, bits).T),
        "a.qzeros": packed(stored_zeros, bits),
        "a.scales": scales,
    }
    if not is_ordered:
        places = rng.permutation(places)
        stored["a.g_idx"] = places.astype(np.int32)
    fields = settings("gptq", bits=bits, group_size=8, checkpoint_format=form)
    decoded = np.asarray(decode_weights(fields, stored)["a.weight"])
    assert decoded.shape == (outs, ins)
    for row in range(ins):
        for out in range(outs):
            step = np.float32(values[row, out] - zeros[places[row], out])
            assert decoded[out, row] == step * np.float32(scales[places[row], out])


AWQ = settings("awq", bits=4, group_size=8)
GPTQ = settings("gptq", bits=4, group_size=8)
WORDS = np.zeros((8, 2), np.int32)


@pytest.mark.parametrize(
    ("fields", "tensors", "text"),
    [
        (settings("awq", bits=4, version="gemv"), {}, "version='gemv' is not read here, only"),
        (settings("awq", bits=3), {}, "bits=3 is not read here, only 4"),
        (settings("gptq", bits=3), {}, "bits=3 is not read here, only 4 and 8"),
        (settings("gptq", bits=4, checkpoint_format="marlin"), {}, "checkpoint_format='marlin'"),
        (settings("gptq", bits=4, group_size=0), {"a.qweight": WORDS}, "a.qzeros is missing"),
        (settings("compressed-tensors", format="int-quantized"), {}, "format='int-quantized' is"),
        (settings("compressed-tensors", format="pack-quantized"), {}, "config_groups=None is not"),
        (scheme(3), {}, "config_groups.weights.num_bits=3 is not read here, only 4 and 8"),
        (scheme(type="float"), {}, "config_groups.weights.type='float' is not read here"),
        (scheme(), {"a.weight_scale": WORDS}, "a.weight_scale has no weight_packed beside it"),
        (scheme(), {"a.weight_packed": WORDS}, "a.weight_shape is missing"),
        (AWQ, {"a.scales": WORDS}, "a.scales has no qweight beside it"),
        (
            AWQ,
            {"a.qweight": WORDS, "a.qzeros": WORDS, "a.scales": np.ones((1, 16))},
            "a.qzeros is [8, 2], expected [1, 2]",
        ),
        (
            AWQ,
            {"a.qweight": np.ones((8, 2)), "a.qzeros": WORDS, "a.scales": np.ones((1, 16))},
            "a.qweight is float64 [8, 2], expected a matrix of int32",
        ),
        (
            GPTQ,
            {"a.qweight": WORDS, "a.qzeros": WORDS, "a.scales": np.ones((8, 3))},
            "a.qzeros is [8, 2], expected [8, 1]",
        ),
    ],
)
def test_packed_integers_that_cannot_be_read_are_refused_in_words(fields, tensors, text):
    with pytest.raises(CheckpointError) as error:
        decode_weights(fields, tensors)
    assert text in str(error.value)


def test_a_group_that_is_not_there_is_refused_when_it_is_read():
    stored = {
        "a.qweight": np.zeros((2, 8), np.int32),
        "a.qzeros": np.zeros((2, 1), np.int32),
        "a.scales": np.ones((2, 8), np.float16),
        "a.g_idx": np.full(16, 2, np.int32),
    }
    decoded = decode_weights(GPTQ, stored)
    with pytest.raises(CheckpointError, match="a.g_idx must hold groups from 0 to 1"):
        np.asarray(decoded["a.weight"])


def test_a_directory_of_packed_experts_is_read_as_their_values(tmp_path):
    golden = huggingface_models.read("qwen3_moe")
    stored = {}
    values = {}
    for name, tensor in golden.state.items():
        stored[name] = values[name] = tensor
        if ".experts." in name:
            del stored[name]
            parts, values[name] = compressed(tensor, group=2)
            stored |= {f"{name.removesuffix('weight')}{part}": x for part, x in parts.items()}
    planned = {name: Planned(value.shape, value.dtype.name) for name, value in stored.items()}
    write_tensors(tmp_path, planned, stored.__getitem__, max_shard_bytes=1 << 30)
    (tmp_path / "config.json").write_text(json.dumps(golden.config | scheme()))
    found = read_huggingface(tmp_path)
    expected = read_huggingface(golden.config, values)
    assert found.model == expected.model
    for stack, blocks in expected.params.items():
        if "moe" in blocks:
            for name, array in blocks["moe"]["experts"].items():
                np.testing.assert_array_equal(found.params[stack]["moe"]["experts"][name], array)
