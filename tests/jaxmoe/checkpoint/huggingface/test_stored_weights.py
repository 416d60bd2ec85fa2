# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Weights in few bits are the products that their formats define, value for value."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import read_huggingface
from jaxmoe.checkpoint.huggingface.files import Planned, open_tensors, write_file, write_tensors
from jaxmoe.checkpoint.huggingface.stored_weights import decode_weights
from jaxmoe.checkpoint.manifest import CheckpointError
from tests.support import huggingface_models

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def drawn_fp8(rng, shape):
    return rng.normal(size=shape).astype(jnp.float8_e4m3fn)


def test_fp8_blocks_equal_a_loop():
    rng = np.random.default_rng(0)
    weight = drawn_fp8(rng, (10, 7))
    scales = rng.uniform(0.5, 2.0, size=(3, 3)).astype(np.float32)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "b.weight": np.ones(3)}
    decoded = decode_weights(FP8, tensors)
    assert decoded.keys() == {"a.weight", "b.weight"}
    expected = np.empty((10, 7), np.float32)
    for row in range(10):
        for column in range(7):
            expected[row, column] = np.float32(weight[row, column]) * scales[row // 4, column // 3]
    np.testing.assert_array_equal(np.asarray(decoded["a.weight"]), expected)


def test_fp8_of_stacked_experts_and_of_one_scale():
    rng = np.random.default_rng(1)
    stack = drawn_fp8(rng, (2, 5, 6))
    scales = rng.uniform(0.5, 2.0, size=(2, 2, 2)).astype(np.float32)
    whole = drawn_fp8(rng, (5, 6))
    tensors = {"e": stack, "e_scale_inv": scales, "w": whole, "w_scale_inv": np.float32(0.25)}
    decoded = decode_weights(FP8, tensors)
    for expert in range(2):
        alone = decode_weights(FP8, {"x": stack[expert], "x_scale_inv": scales[expert]})["x"]
        np.testing.assert_array_equal(np.asarray(decoded["e"])[expert], np.asarray(alone))
    np.testing.assert_array_equal(np.asarray(decoded["w"]), whole.astype(np.float32) * 0.25)


def test_mxfp4_equals_a_loop():
    rng = np.random.default_rng(2)
    blocks = rng.integers(256, size=(2, 3, 2, 16)).astype(np.uint8)
    scales = rng.integers(120, 135, size=(2, 3, 2)).astype(np.uint8)
    decoded = decode_weights(MXFP4, {"m.up_blocks": blocks, "m.up_scales": scales})
    values = np.asarray(decoded["m.up"])
    assert decoded["m.up"].shape == values.shape == (2, 64, 3)
    for expert in range(2):
        for out in range(3):
            for index in range(64):
                byte = int(blocks[expert, out, index // 32, index % 32 // 2])
                code = byte >> 4 if index % 2 else byte & 15
                exponent = int(scales[expert, out, index // 32]) - 127
                assert values[expert, index, out] == FP4[code] * 2.0**exponent


@pytest.mark.parametrize(
    ("fields", "tensors", "text"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, {}, "quant_method='hqq' is not read"),
        ({"quantization_config": "fp8"}, {}, "quant_method=None is not read"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 3]}},
            {},
            "weight_block_size=[0, 3] must be two integers above 0",
        ),
        (FP8, {"a": np.ones((4, 3)), "a_scale_inv": np.ones((2, 1))}, "expected [1, 1]"),
        (FP8, {"a": jnp.ones((4, 3), jnp.float8_e4m3fn)}, "a_scale_inv is missing"),
        (FP8, {"a_scale_inv": np.ones((2, 1))}, "has no weight beside it"),
        (MXFP4, {"a_blocks": np.ones((1, 2, 1, 16))}, "has no a_scales beside it"),
        (MXFP4, {"a_scales": np.ones((1, 2, 1))}, "has no blocks beside it"),
        (
            MXFP4,
            {"a_blocks": np.ones((1, 2, 16)), "a_scales": np.ones((1, 2))},
            "must be [E, out, in / 32, 16]",
        ),
    ],
)
def test_stored_weights_that_cannot_be_read_are_refused_in_words(fields, tensors, text):
    with pytest.raises(CheckpointError) as error:
        decode_weights(fields, tensors)
    assert text in str(error.value)


@pytest.fixture
def stored(tmp_path):
    """Mixtral with fp8 experts on disk, and the values that they stand for."""
    golden = huggingface_models.read("mixtral")
    rng = np.random.default_rng(3)
    tensors = {}
    values = {}
    for name, tensor in golden.state.items():
        tensors[name] = values[name] = tensor
        if ".experts." in name:
            rows, columns = tensor.shape
            scales = rng.uniform(0.5, 2.0, size=(-(-rows // 4), -(-columns // 3)))
            narrow = tensor.astype(jnp.float8_e4m3fn)
            tensors[name] = narrow
            tensors[f"{name}_scale_inv"] = scales.astype(np.float32)
            factors = np.repeat(np.repeat(scales, 4, 0), 3, 1)[:rows, :columns]
            values[name] = narrow.astype(np.float32) * factors.astype(np.float32)
    planned = {name: Planned(value.shape, value.dtype.name) for name, value in tensors.items()}
    write_tensors(tmp_path, planned, tensors.__getitem__, max_shard_bytes=1 << 30)
    (tmp_path / "config.json").write_text(json.dumps(golden.config | FP8))
    return tmp_path, golden.config, values


def test_a_directory_of_fp8_weights_is_read_as_their_values(stored):
    directory, config, values = stored
    found = read_huggingface(directory)
    expected = read_huggingface(config, values)
    assert found.model == expected.model
    for ours, theirs in zip(*map(leaves, (found.params, expected.params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def leaves(tree):
    return [np.asarray(leaf) for _, leaf in sorted(flat(tree))]


def flat(tree, path=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}/{name}")
        else:
            yield f"{path}/{name}", value


def test_frequencies_of_old_files_and_files_beside_the_whole_one_are_left_alone(tmp_path):
    golden = huggingface_models.read("olmoe")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    state = golden.state | old
    directory = huggingface_models.write_directory(tmp_path / "it", golden.config, state)
    extra = {"tok_embeddings.weight": Planned((3,), "float32")}
    write_file(directory / "consolidated.safetensors", extra, lambda _: np.ones(3, np.float32))
    assert open_tensors(directory).keys() == state.keys()
    found = read_huggingface(directory)
    expected = read_huggingface(golden.config, golden.state)
    for ours, theirs in zip(*map(leaves, (found.params, expected.params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_values_are_those_of_transformers():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
    from transformers.integrations.mxfp4 import dequantize_convertops

    rng = np.random.default_rng(4)
    weight = torch.tensor(rng.normal(size=(10, 7))).to(torch.float8_e4m3fn)
    scales = torch.tensor(rng.uniform(0.5, 2.0, size=(3, 3))).float()
    decoded = decode_weights(FP8, {"a": weight, "a_scale_inv": scales})["a"]
    wide = _dequantize_fp8_weight(weight, scales, [4, 3], torch.float32)
    np.testing.assert_array_equal(np.asarray(decoded), wide.numpy())
    blocks = torch.tensor(rng.integers(256, size=(2, 3, 2, 16)).astype(np.uint8))
    exponents = torch.tensor(rng.integers(120, 135, size=(2, 3, 2)).astype(np.uint8))
    decoded = decode_weights(MXFP4, {"m_blocks": blocks, "m_scales": exponents})["m"]
    wide = dequantize_convertops(blocks, exponents, torch.float32)
    np.testing.assert_array_equal(np.asarray(decoded), wide.detach().numpy())
