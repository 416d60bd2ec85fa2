# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of `transformers`: their golden arrays, and the models themselves.

Every parameter is random, gains included, of a size at which RoPE, norms and gates matter, and
exact in float16, as which the golden files hold it.

`transformers` and PyTorch are imported by `build` alone. To add a case: a row in CONFIGS of
`huggingface_configs.py`, and
`pytest -m slow --regenerate-golden tests/jaxmoe/checkpoint/huggingface/test_parity.py`.
"""

import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.checkpoint.huggingface.files import Planned, write_tensors
from tests.support.huggingface_configs import CONFIGS as CONFIGS

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "huggingface"
BATCH, LENGTH = 2, 9


def balance_coefficient(config: dict[str, Any]) -> float | None:
    """The coefficient of the load-balancing loss; None if the family has none."""
    parts = config | config.get("ffn_config", {})
    return parts.get("router_aux_loss_coef", parts.get("moe_loss_weight"))


BALANCED = tuple(name for name, config in CONFIGS.items() if balance_coefficient(config))
"""Families with a load-balancing loss."""


SAME_IN_MEMORY = ("dbrx", "gpt_oss", "llama4_text", "jetmoe")
"""Families whose tensors have the same names on disk and in memory."""

_NAMED = ("qwen3_5_moe_text", "bailing_moe")
"""Families of models that an earlier family computes too, under other names of tensors."""


OF_NO_CLASS = ("bailing_moe", "bailing_moe_v2_5")
"""Families that transformers has no class of; `ling.py` has one."""


FILE_TYPES = {"bailing_moe_v2_5": "bailing_hybrid"}
"""Families whose files have the `model_type` of another one, and differ by their architecture."""

IN_FLOAT64 = ("qwen3_next",)
"""Families whose logits in float32 are as far from those in float64 as the tests allow."""


def family_options(config: dict[str, Any]) -> dict[str, str]:
    """Return the argument of `to_huggingface` that makes it write the family of a config."""
    name = config["model_type"]
    return {"family": name} if name in _NAMED else {}


def has_experts(config: dict[str, Any]) -> bool:
    """Whether the model has more than one expert in some layer."""
    return all(config.get(name, 2) > 1 for name in ("num_experts", "num_local_experts"))


class Golden(NamedTuple):
    """Inputs and outputs of a model of `transformers`."""

    config: dict[str, Any]
    state: dict[str, np.ndarray]
    """Tensors as on disk: one per expert."""
    tokens: np.ndarray
    logits: np.ndarray
    balance: float
    """Load-balancing loss without coefficient; NaN if the family has none."""


def tokens_of(config: dict[str, Any]) -> np.ndarray:
    """Tokens [BATCH LENGTH]."""
    drawn = np.random.default_rng(1).integers(config["vocab_size"], size=(BATCH, LENGTH))
    return drawn.astype(np.int32)


def outputs_of(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """Return logits and load-balancing loss (NaN if the family has none)."""
    import torch

    is_balanced = model.config.model_type in BALANCED and has_experts(model.config.to_dict())
    asked = {"output_router_logits": True} if is_balanced else {}
    with torch.no_grad():
        output = model(torch.tensor(tokens).long(), **asked)
    return output.logits.numpy(), float(output.aux_loss) if asked else float("nan")


def read(name: str) -> Golden:
    """The golden arrays of a case."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        state = {
            key.removeprefix("state/"): arrays[key].astype(np.float32)
            for key in arrays.files
            if key.startswith("state/")
        }
        config = json.loads(str(arrays["config"]))
        return Golden(config, state, arrays["tokens"], arrays["logits"], float(arrays["balance"]))


def write(name: str, golden: Golden) -> None:
    """Write the golden arrays."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    state = {
        f"state/{key}": half if np.array_equal(half := value.astype(np.float16), value) else value
        for key, value in golden.state.items()
    }
    about = {"tokens": golden.tokens, "logits": golden.logits, "balance": golden.balance}
    config = np.asarray(json.dumps(golden.config))
    np.savez_compressed(GOLDEN / f"{name}.npz", config=config, **about, **state)


def write_directory(place, config, state, shard_bytes=1 << 30):
    """Write a model as `save_pretrained` does, and return the directory."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    planned = {name: Planned(values.shape, "float32") for name, values in state.items()}
    write_tensors(place, planned, state.__getitem__, max_shard_bytes=shard_bytes)
    return place


_RENAMED = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    "block_sparse_moe.e_score_correction_bias": "mlp.e_score_correction_bias",
    "mlp.moe_statics.e_score_correction_bias": "mlp.gate.moe_statics.e_score_correction_bias",
}
"""Names on disk and in memory of tensors that are stacked in both."""
_UNGATED = re.compile(r"(.*\.mixer)\.experts\.0\.up_proj\.weight")
_EXPERT = re.compile(r"(.*)\.experts\.0\.(?:gate_proj|w1)\.weight")


def stacked(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The layout in memory of transformers 5: experts stacked, gate before up."""
    state, names = dict(state), ("gate_proj", "up_proj", "down_proj")
    state = {re.sub("^backbone", "model", key): values for key, values in state.items()}
    for block in [match[1] for key in list(state) if (match := _UNGATED.fullmatch(key))]:
        for name in ("up_proj", "down_proj"):
            keys = [
                key for key in state if re.fullmatch(rf"{block}\.experts\.\d+\.{name}\.weight", key)
            ]
            keys.sort(key=lambda key: int(key.split(".")[-3]))
            state[f"{block}.experts.{name}"] = np.stack([state.pop(key) for key in keys])
    for old, new in _RENAMED.items():
        for key in [key for key in state if key.endswith(old)]:
            state[key.removesuffix(old) + new] = state.pop(key)
    for block in [match[1] for key in list(state) if (match := _EXPERT.fullmatch(key))]:
        if f"{block}.experts.0.w1.weight" in state:
            names = ("w1", "w3", "w2")
        experts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for name in names:  # LongCat-Flash has more gates than down projections
            while (key := f"{block}.experts.{len(experts[name])}.{name}.weight") in state:
                experts[name].append(state.pop(key))
        gate, up, down = (np.stack(experts[name]) for name in names)
        if block.endswith(".feed_forward"):
            state[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            state[f"{block}.experts.down_proj"] = down
            continue
        mlp = block.replace("block_sparse_moe", "mlp")
        state[f"{mlp}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        state[f"{mlp}.experts.down_proj"] = down
        if f"{block}.gate.weight" in state:
            router = "router" if "model.norm.bias" in state else "gate"  # of Phi-3.5-MoE
            state[f"{mlp}.{router}.weight"] = state.pop(f"{block}.gate.weight")
    return state


_CENTRED = ("qwen3_next", "qwen3_5_moe_text")
"""Families whose gains are 1 + w, those of delta layers excepted."""
_RECURRENT = (".mamba.", ".conv.")
"""Parts of names of mixers whose biases are drawn about 1."""


def build(config: dict[str, Any]) -> Any:
    """Return the model of `transformers` with deterministic random weights."""
    import torch
    import transformers

    if config["model_type"] in OF_NO_CLASS:  # of which transformers has no class
        from tests.support import ling

        ling.register()
    fields = {key: value for key, value in config.items() if key != "model_type"}
    # Its faster experts want rows of whole multiples of 16 bytes.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = transformers.AutoConfig.for_model(config["model_type"], **eager, **fields)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_bias = name.endswith(".bias") and not any(part in name for part in _RECURRENT)
            is_gain = parameter.ndim == 1 and not is_bias
            values = rng.normal(size=parameter.shape) * (0.3 if is_gain else 0.4) + is_gain
            if name.endswith(
                (
                    "gate.weight",
                    "router.weight",
                    "gate.wg.weight",
                    "router.layer.weight",
                    "router.classifier.weight",
                )
            ):
                values *= 0.3  # an uneven router, yet one without certainty
            if config["model_type"] in _CENTRED and ".linear_attn." not in name:
                values -= is_gain
            if name.endswith("forget_gate.A_log"):
                values -= 1.0
            if name.endswith(".linear_attn.A_log"):
                values -= 2.0  # decays of a half, not of almost all
            if name.endswith("self_attn.sinks"):
                values -= is_gain
            if name.endswith("e_score_correction_bias"):
                values *= 0.5
            parameter.copy_(torch.tensor(values.astype(np.float16).astype(np.float32)))
        for name, buffer in model.named_buffers():
            if name.endswith(
                ("e_score_correction_bias", "expert_bias")
            ):  # of the size of differences of scores
                values = (0.2 * rng.normal(size=buffer.shape)).astype(np.float16)
                buffer.copy_(torch.tensor(values.astype(np.float32)))
    return model
