# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters as files of PEFT: parity of logits in both directions, and import after export."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe import Transformer
from jaxmoe.adapters import LoraConfig, TargetsConfig, plain
from jaxmoe.checkpoint import CheckpointError, from_huggingface, to_huggingface
from jaxmoe.checkpoint.huggingface.files import Planned, open_tensors, write_file
from jaxmoe.checkpoint.huggingface.peft import write_peft
from jaxmoe.checkpoint.huggingface.peft_import import read_peft
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.routing import SoftmaxGateConfig, SoftmaxTopKConfig
from jaxmoe.scaling.initialize import parameter_table

ATTENTION, EXPERTS = ("attention_in", "attention_out"), ("expert_in", "expert_out")
TOKENS = np.random.default_rng(0).integers(26, size=(1, 7)).astype(np.int32)


def model_of(qk_norm="full", dense=()) -> ModelConfig:
    """A model of OLMoE, or of Qwen3-MoE with qk_norm head: odd widths, three experts."""
    return ModelConfig(
        vocab_size=26,
        num_layers=2 if not dense else 3,
        embed_dim=12,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=6, qk_norm=qk_norm),
        moe=MoEConfig(num_experts=3, top_k=2, expert_dim=5),
        dense_layers=dense,
        dense_dim=7,
    )


CASES = {
    "attention": (model_of(), LoraConfig(rank=2, alpha=3.0)),
    "experts": (
        model_of(),
        LoraConfig(rank=4, expert_rank=2, targets=TargetsConfig(roles=ATTENTION + EXPERTS)),
    ),
    "one layer, rank-stabilised, one matrix of the experts": (
        model_of(),
        LoraConfig(
            rank=2,
            expert_rank=2,
            is_rank_stabilized=True,
            targets=TargetsConfig(roles=("attention_out", "expert_in"), layers=(1,)),
        ),
    ),
    "dense layer, router, head": (
        model_of(qk_norm="head", dense=(1,)),
        LoraConfig(
            rank=2, targets=TargetsConfig(roles=("mlp_in", "mlp_out", "router", "head", *EXPERTS))
        ),
    ),
}


_PLAIN = model_of(qk_norm="none")
assert _PLAIN.moe is not None
_ROUTER = SoftmaxTopKConfig(softmax="after")
CASES["Mixtral"] = (
    dataclasses.replace(
        _PLAIN, moe=dataclasses.replace(_PLAIN.moe, router=_ROUTER, gate=SoftmaxGateConfig())
    ),
    LoraConfig(
        rank=4, expert_rank=2, targets=TargetsConfig(roles=(*ATTENTION, *EXPERTS, "router"))
    ),
)


def adapted(model: ModelConfig, adapter: LoraConfig):
    """The adapted model, and parameters with random factors."""
    model = dataclasses.replace(model, adapter=adapter)
    rng, flat = np.random.default_rng(1), {}
    for row in parameter_table(model):
        values = 0.4 * rng.normal(size=row.shape) + row.path.endswith("gain")
        if row.path.endswith(":scale"):
            values = row.declaration.init
        flat[row.path] = jnp.asarray(values, jnp.float32).reshape(row.shape)
    return model, traverse_util.unflatten_dict(flat, sep="/")


def logits_of(model: ModelConfig, params) -> np.ndarray:
    """Logits of TOKENS."""
    return np.asarray(Transformer(model).apply({"params": params}, jnp.asarray(TOKENS)).logits)


@pytest.mark.parametrize("name", CASES)
def test_import_is_the_inverse_of_export(name, tmp_path):
    model, params = adapted(*CASES[name])
    flat = traverse_util.flatten_dict(params, sep="/")
    write_peft(tmp_path / "adapter", model, flat, base="base")
    adapter, arrays = read_peft(tmp_path / "adapter", dataclasses.replace(model, adapter=None))
    own = {path for path in flat if ":" in path}
    assert arrays.keys() == own
    layers = CASES[name][1].targets.layers
    for path in own:
        kept = slice(layers[0], None) if layers else slice(None)
        wanted = np.asarray(flat[path])
        assert np.array_equal(np.atleast_1d(arrays[path])[kept], np.atleast_1d(wanted)[kept]), path
    assert adapter.targets.layers == layers
    assert set(adapter.targets.roles) == set(CASES[name][1].targets.roles)


@pytest.fixture(scope="module")
def peft():
    pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    return pytest.importorskip("peft", reason="peft is not installed: extra hf")


def torch_logits(model) -> np.ndarray:
    """Logits of TOKENS of a model of transformers."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(TOKENS).long()).logits.numpy()


def opened(place):
    """The model of transformers in a directory."""
    import transformers

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(place, **eager).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_peft_gives_our_logits(name, tmp_path, peft):
    model, params = adapted(*CASES[name])
    base = dataclasses.replace(model, adapter=None)
    to_huggingface(base, plain(params), tmp_path / "base")
    flat = traverse_util.flatten_dict(params, sep="/")
    write_peft(tmp_path / "adapter", model, flat, base=str(tmp_path / "base"))
    theirs = opened(tmp_path / "base")
    before = torch_logits(theirs)
    loaded = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    wanted = logits_of(model, params)
    assert np.abs(wanted - before).max() > 1e-2  # the adapter changes something
    np.testing.assert_allclose(torch_logits(loaded), wanted, atol=1e-4, rtol=1e-4)


MADE = {
    "attention of q and v": {"target_modules": ["q_proj", "v_proj"]},
    "experts, ranks and scales of their own": {
        "target_modules": ["o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 3},
        "alpha_pattern": {"experts.gate_up_proj": 5},
    },
    "gate and up as modules, different A": {
        "target_parameters": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "layers_to_transform": [1],
        "use_rslora": True,
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MADE)
def test_adapter_of_peft_gives_its_logits(name, tmp_path, peft):
    import torch

    base = model_of(qk_norm="head", dense=(1,)) if "gate and up" in name else model_of()
    params = plain(adapted(base, LoraConfig())[1])
    to_huggingface(base, params, tmp_path / "base")
    fields = {"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM", "target_modules": [], **MADE[name]}
    theirs = peft.get_peft_model(opened(tmp_path / "base"), peft.LoraConfig(**fields)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for key, value in theirs.named_parameters():
            if "lora_" in key:
                value.copy_(0.4 * torch.randn(value.shape))
    theirs.save_pretrained(tmp_path / "adapter")
    model, values = from_huggingface(tmp_path / "base")
    before = logits_of(model, values)
    adapter, arrays = read_peft(tmp_path / "adapter", model)
    flat = traverse_util.flatten_dict(values, sep="/") | arrays
    own = dataclasses.replace(model, adapter=adapter)
    assert flat.keys() == {row.path for row in parameter_table(own)}
    found = logits_of(own, traverse_util.unflatten_dict(flat, sep="/"))
    assert np.abs(found - before).max() > 1e-2
    np.testing.assert_allclose(found, torch_logits(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("key", ["lm_head.base_layer", "lm_head", "model.embed_tokens"])
def test_weights_of_the_model_beside_the_factors_are_compared(key, tmp_path, caplog):
    """peft stores those of an adapted head, or of a vocabulary that it takes for a changed one."""
    model, adapter = CASES["dense layer, router, head"]
    adapted_model, params = adapted(model, adapter)
    flat = traverse_util.flatten_dict(params, sep="/")
    write_peft(tmp_path / "ad", adapted_model, flat, base="base")
    file = tmp_path / "ad" / "adapter_model.safetensors"
    tensors = {name: np.asarray(value) for name, value in open_tensors(file).items()}
    place = "embedding" if "embed" in key else "head"
    rows = {row.declaration.role: row for row in parameter_table(model)}
    weights = plain(params)
    own = np.asarray(flat[rows[place].path])
    own = own if own.shape[0] == model.vocab_size else own.T
    name = f"base_model.model.{key}.weight"

    def stored(values):
        held = tensors | {name: np.asarray(values)}
        planned = {one: Planned(value.shape, "float32") for one, value in held.items()}
        write_file(file, planned, held.__getitem__)

    stored(own)
    found, arrays = read_peft(tmp_path / "ad", model, lambda: weights)
    assert "head" in found.targets.roles and not any("base_layer" in path for path in arrays)
    assert not caplog.records
    assert read_peft(tmp_path / "ad", model)[0] == found and name in caplog.text
    stored(own + 1)
    with pytest.raises(CheckpointError, match="are other weights than the model's"):
        read_peft(tmp_path / "ad", model, lambda: weights)
    stored(np.concatenate([own, own[:1]]))
    with pytest.raises(CheckpointError, match="its vocabulary was resized for the adapter"):
        read_peft(tmp_path / "ad", model)
