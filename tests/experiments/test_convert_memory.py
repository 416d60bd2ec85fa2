# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of a conversion in both directions: two of the largest layers and a constant.

    peak of the process - what it had after its imports <= 2 x largest layer + constant

The constant is 1 GB for a model of a billion parameters (`make test-large`), and 256 MB for one of
69 million, of which the first matrices of all experts have 134 MB. A layer is all of one block, in
float32, as a run keeps it.
"""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from jaxmoe.checkpoint.huggingface.files import Planned, open_tensors, write_tensors
from tests.support.runs import ROOT

# A process that converts and says what it took. Its own high-water mark: that of getrusage begins
# with the one of the process that started it.
CHILD = """
import os, pathlib, re, sys
import jax
from experiments.checkpoint import __main__ as checkpoint

def kilobytes(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+)", text)[1])

jax.devices()
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
assert checkpoint.main(sys.argv[1:]) == 0
print("peak", 1024 * (kilobytes("VmHWM") - before))
"""

SIZES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 16, "intermediate_size": 128},
    "billion": {"hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 288},
}
EXPERTS = {"small": 16, "billion": 64}
VOCABULARY = {"small": 2048, "billion": 50304}


def fields_of(name):
    """A model of the family OLMoE."""
    heads = SIZES[name]["hidden_size"] // 64
    return {
        **SIZES[name],
        "model_type": "olmoe",
        "vocab_size": VOCABULARY[name],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts": EXPERTS[name],
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }


def shapes_of(fields):
    """Every tensor of the model, in the order of layers."""
    width, inner = fields["hidden_size"], fields["intermediate_size"]
    yield "model.embed_tokens.weight", (fields["vocab_size"], width)
    for layer in range(fields["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{block}.{norm}.weight", (width,)
        for part in "qkvo":
            yield f"{block}.self_attn.{part}_proj.weight", (width, width)
        for norm in ("q_norm", "k_norm"):
            yield f"{block}.self_attn.{norm}.weight", (width,)
        yield f"{block}.mlp.gate.weight", (fields["num_experts"], width)
        for expert in range(fields["num_experts"]):
            for part, shape in {
                "gate": (inner, width),
                "up": (inner, width),
                "down": (width, inner),
            }.items():
                yield f"{block}.mlp.experts.{expert}.{part}_proj.weight", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (fields["vocab_size"], width)


def write_random(directory: pathlib.Path, name: str) -> int:
    """A model of random bfloat16; returns the bytes of its largest layer in float32."""
    directory.mkdir()
    fields = fields_of(name)
    (directory / "config.json").write_text(json.dumps(fields))
    planned = {key: Planned(shape, "bfloat16") for key, shape in shapes_of(fields)}
    rng = np.random.default_rng(0)
    block = (0.02 * rng.standard_normal(1 << 20, np.float32)).astype(ml_dtypes.bfloat16)

    def values(key):
        shape = planned[key].shape
        first = int(rng.integers(block.size))
        return np.resize(np.roll(block[: 1 << 16], first) if len(shape) == 1 else block, shape)

    write_tensors(directory, planned, values, max_shard_bytes=1 << 29)
    sizes: dict[str, int] = {}
    for key, tensor in planned.items():
        layer = ".".join(key.split(".")[:3]) if ".layers." in key else key
        sizes[layer] = sizes.get(layer, 0) + 2 * tensor.num_bytes
    return max(sizes.values())


def convert(*arguments: str) -> int:
    """Run in a separate process; return its peak memory beyond the imports, bytes."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "convert", *arguments],
        cwd=ROOT,
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.rsplit("peak", 1)[1])


@pytest.mark.parametrize(
    ("name", "constant"),
    [
        pytest.param("small", 256e6, marks=pytest.mark.slow),
        pytest.param("billion", 1e9, marks=pytest.mark.large),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_convert_needs_memory_of_two_layers(name, constant, tmp_path):
    """Import, then export: the tensors are bitwise equal."""
    layer = write_random(tmp_path / "hf", name)
    bound = 2 * layer + constant
    run = ("--run.directory", str(tmp_path / "run"))
    data = ("imported.data:markov", "--imported.data.vocab_size", "16")
    there = convert("--from_huggingface", str(tmp_path / "hf"), "--to", run[1], *data)
    given = ("--exported.dtype", "bfloat16", "--to", str(tmp_path / "again"))
    back = convert(*run, "--to_huggingface", "olmoe", *given)
    said = f"{name}: bound {bound / 1e6:.0f} MB, import {there / 1e6:.0f}, export {back / 1e6:.0f}"
    print(said)
    assert max(there, back) <= bound, said
    first, second = open_tensors(tmp_path / "hf"), open_tensors(tmp_path / "again")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        np.testing.assert_array_equal(
            np.asarray(tensor).view(np.uint16), np.asarray(second[key]).view(np.uint16)
        )
