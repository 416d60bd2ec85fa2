# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the modelling file for models that no family of `transformers` computes.

`MODELING` is the text of modeling_jaxmoe.py, which `from_pretrained(..., trust_remote_code=True)`
executes: plain PyTorch, one expert after another, no cache. Its config holds the whole
`ModelConfig` as JSON; `check_computed` refuses models that the text does not compute.

To add support for a choice: `jaxmoe/checkpoint/huggingface/modeling.py` (the text and `_COMPUTED`),
`tests/jaxmoe/checkpoint/huggingface/test_modeling.py` (a case).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import from_json, to_json
from jaxmoe.models.config import ModelConfig

NAME: Final = "jaxmoe"
FILE: Final = "modeling_jaxmoe.py"
ARCHITECTURE: Final = "JaxmoeForCausalLM"


def fields_of(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json; other tools read the fields beside `jaxmoe`."""
    attention: Any = model.attention
    moe = model.moe
    experts = {} if moe is None else {"num_experts": moe.num_experts, "top_k": moe.top_k}
    return experts | {
        "jaxmoe": to_json(dataclasses.replace(model, multipliers=model.forward_multipliers)),
        "auto_map": {
            "AutoConfig": "modeling_jaxmoe.JaxmoeConfig",
            "AutoModelForCausalLM": f"modeling_jaxmoe.{ARCHITECTURE}",
        },
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "tie_word_embeddings": model.has_tied_embeddings,
        "use_cache": False,
    }


def model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a config.json that `fields_of` wrote."""
    try:
        return from_json(ModelConfig, fields["jaxmoe"])
    except (KeyError, TypeError, ValueError) as error:
        text = f"config.jaxmoe of a model of type {NAME!r} cannot be read: {error!r}"
        raise CheckpointError(text) from error


_COMPUTED: Final = {
    "attention": ("grouped_query",),
    "moe.router": ("softmax_topk", "sigmoid_topk"),
    "moe.router.bias": ("loss_free",),
    "moe.gate": ("softmax", "renormalized", "sqrt"),
    "residual": ("standard",),
}
"""Members of unions that the modelling file computes."""


_FIELDS: Final = {
    "": "vocab_size num_layers embed_dim attention moe dense_layers dense_dim layers norm_epsilon"
    " residual has_tied_embeddings multipliers",
    "attention": "num_heads num_kv_heads head_dim qk_norm is_gated rope_theta window softcap",
    "moe": "num_experts top_k expert_dim num_shared_experts router gate balancers capacity",
    "moe.router": "bias groups softmax jitter",
    "moe.gate": "scale",
}
"""Fields that the modelling file reads, or that change no logit; others have their defaults."""


def _others(part: Any, path: str, computed: Sequence[str]) -> list[str]:
    """Return a line for each other field of a config that has no default value."""
    prefix = ".".join(filter(None, ("model", path)))
    return [
        f"{prefix}.{field.name}: only {field.default}"
        for field in dataclasses.fields(part)
        if field.name not in computed and getattr(part, field.name) != field.default
    ]


def check_computed(model: ModelConfig) -> None:
    """Raise if the modelling file does not compute a model.

    Raises:
        CheckpointError: One line for each choice that it does not compute.
    """
    moe = model.moe
    chosen = dict[str, Any](attention=model.attention, residual=model.residual)
    if moe is not None:
        bias = getattr(moe.router, "bias", None)
        chosen |= {"moe.router": moe.router, "moe.router.bias": bias, "moe.gate": moe.gate}
    lines = [
        f"model.{path}={chosen[path].name}: only {' and '.join(names)}"
        for path, names in _COMPUTED.items()
        if chosen.get(path) is not None and chosen[path].name not in names
    ]
    parts = chosen | {"": model, "moe": moe}
    for path, computed in _FIELDS.items():
        if (part := parts.get(path)) is not None:
            lines += _others(part, path, computed.split())
    mixers = {kind.mixer for kind in model.kinds} - {model.attention}
    if mixers:
        names = sorted({mixer.name for mixer in mixers})
        lines.append(f"model.layers with the mixer {' and '.join(names)}")
    named = {layer.feed_forward.name for layer in model.layers if layer.feed_forward is not None}
    if named:
        lines.append(f"model.layers with the feed-forward {' and '.join(sorted(named))}")
    if moe is not None and moe.capacity is not None and not moe.capacity.traits.is_for_training:
        lines.append("model.moe.capacity: only None")
    if lines:
        raise CheckpointError(
            f"{FILE} does not compute all of this model:\n  " + "\n  ".join(lines)
        )


MODELING: Final = '''# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a model of jaxmoe in plain PyTorch, as config.jaxmoe describes it.

There is no cache of keys and values: generate with use_cache=False.
"""

import math

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
if int(transformers.__version__.split(".")[0]) < 5:
    _TIED = list(_TIED)


class JaxmoeConfig(PretrainedConfig):
    model_type = "jaxmoe"

    def __init__(self, jaxmoe=None, **kwargs):
        self.jaxmoe = jaxmoe or {}
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    def __init__(self, dim, epsilon):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(dim)), epsilon

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (wide * self.weight.float()).to(x.dtype)


def rotate(x, positions, theta):
    """Apply RoPE to heads [B N S H]: feature h is paired with feature h + H/2."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float32, device=x.device) / half
    angles = positions[:, None, :, None].float() * theta**-exponents
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, model):
        super().__init__()
        config, width = model["attention"], model["embed_dim"]
        self.config, dim = config, config["head_dim"]
        heads, kv_heads = config["num_heads"], config["num_kv_heads"]
        self.scale = model["multipliers"]["attention_scale"]
        self.scale = dim**-0.5 if self.scale is None else self.scale
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        if config["is_gated"]:
            self.gate_proj = nn.Linear(width, heads, bias=False)
        sizes = {"head": (dim, dim), "full": (heads * dim, kv_heads * dim)}
        self.epsilon = model["norm_epsilon"]
        if config["qk_norm"] in sizes:
            q_dim, k_dim = sizes[config["qk_norm"]]
            self.q_norm = RMSNorm(q_dim, model["norm_epsilon"])
            self.k_norm = RMSNorm(k_dim, model["norm_epsilon"])

    def heads(self, x, name):
        """Return normalised heads [B N S H]."""
        kind, dim = self.config["qk_norm"], self.config["head_dim"]
        x = getattr(self, name + "_proj")(x)
        if kind == "full" and name != "v":
            x = getattr(self, name + "_norm")(x)
        x = x.view(*x.shape[:2], -1, dim)
        if kind == "head" and name != "v":
            x = getattr(self, name + "_norm")(x)
        if kind == "unit" and name != "v":
            wide = x.float()
            x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x)
        return x.transpose(1, 2)

    def forward(self, x, positions, is_seen):
        config = self.config
        q, k, v = (self.heads(x, name) for name in "qkv")
        q, k = (rotate(side, positions, config["rope_theta"]) for side in (q, k))
        groups = config["num_heads"] // config["num_kv_heads"]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        logits = self.scale * (q.float() @ k.float().transpose(2, 3))
        if config["softcap"] is not None:
            logits = config["softcap"] * torch.tanh(logits / config["softcap"])
        if config["window"] is not None:
            distance = positions[:, None, :, None] - positions[:, None, None, :]
            is_seen = is_seen & (distance < config["window"])
        weights = torch.softmax(logits.masked_fill(~is_seen, float("-inf")), -1).nan_to_num()
        out = (weights.to(v.dtype) @ v).transpose(1, 2)
        if config["is_gated"]:
            out = out * torch.sigmoid(self.gate_proj(x).float())[..., None].to(out.dtype)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class SwiGLU(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Chooses experts and their gates."""

    def __init__(self, model):
        super().__init__()
        self.moe, self.multiplier = model["moe"], model["multipliers"]["router"]
        number = self.moe["num_experts"]
        self.weight = nn.Parameter(torch.zeros(number, model["embed_dim"]))
        self.has_bias = self.moe["router"]["bias"] is not None
        if self.has_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(number))

    def forward(self, x):
        config, top_k = self.moe["router"], self.moe["top_k"]
        logits = (x.float() * self.multiplier) @ self.weight.float().T
        is_softmax = config["kind"] == "softmax_topk"
        log_scores = F.log_softmax(logits, -1) if is_softmax else F.logsigmoid(logits)
        is_plain = not self.has_bias and config["groups"] is None
        preference = logits if is_plain else log_scores.exp()  # equal logits stay equal
        if self.has_bias:
            preference = preference + self.e_score_correction_bias.float()
        if config["groups"] is not None:
            preference = self.in_groups(preference, config["groups"])
        ids = torch.topk(preference, top_k, dim=-1).indices
        scores = log_scores.gather(1, ids)
        if is_softmax and config["softmax"] == "after":
            scores = F.log_softmax(logits.gather(1, ids), -1)
        gate = self.moe["gate"]
        if gate["kind"] == "sqrt":
            return ids, torch.exp(0.5 * F.log_softmax(scores, -1))
        if gate["kind"] == "renormalized":
            scores = F.log_softmax(scores, -1)
        return ids, gate["scale"] * torch.exp(scores)

    def in_groups(self, preference, config):
        """Set the experts of groups that a token may not use to -inf."""
        number, chosen = config["num_groups"], config["top_groups"]
        grouped = preference.view(len(preference), number, -1)
        best = config["best_per_group"]
        if best is None:
            best = min(max(1, self.moe["top_k"] // chosen), grouped.shape[-1])
        groups = grouped.topk(best, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
        is_chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=preference.device)
        is_chosen.scatter_(1, groups, True)
        return grouped.masked_fill(~is_chosen[..., None], float("-inf")).view_as(preference)


class MoE(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.moe, width = model["moe"], model["embed_dim"]
        number, hidden = self.moe["num_experts"], self.moe["expert_dim"]
        self.gate = Router(model)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(number))
        shared = self.moe["num_shared_experts"]
        self.shared_experts = SwiGLU(width, shared * hidden) if shared else None

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        ids, gates = self.gate(rows)
        routed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            tokens, slots = torch.where(ids == number)
            if len(tokens):
                part = expert(rows[tokens]) * gates[tokens, slots, None].to(rows.dtype)
                routed.index_add_(0, tokens, part)
        routed = routed.view_as(x)
        if self.shared_experts is None:
            return routed
        shared = self.shared_experts(x)
        if self.moe["gate"]["kind"] == "sqrt":
            return math.sqrt(0.5) * (routed + shared)
        return routed + shared


class Block(nn.Module):
    def __init__(self, model, layer):
        super().__init__()
        width, epsilon = model["embed_dim"], model["norm_epsilon"]
        self.multiplier = model["multipliers"]["residual"]
        self.input_layernorm = RMSNorm(width, epsilon)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(width, epsilon)
        is_dense = model["moe"] is None or layer in model["dense_layers"]
        self.mlp = SwiGLU(width, model["dense_dim"]) if is_dense else MoE(model)

    def forward(self, x, positions, is_seen):
        y = self.self_attn(self.input_layernorm(x), positions, is_seen)
        x = x + self.multiplier * y
        return x + self.multiplier * self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, model):
        super().__init__()
        width = model["embed_dim"]
        self.embed_tokens = nn.Embedding(model["vocab_size"], width)
        self.layers = nn.ModuleList(Block(model, i) for i in range(model["num_layers"]))
        self.norm = RMSNorm(width, model["norm_epsilon"])


class JaxmoeForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = JaxmoeConfig
    base_model_prefix = "model"
    _tied_weights_keys = _TIED
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]

    def __init__(self, config):
        super().__init__(config)
        model = config.jaxmoe
        self.model = Decoder(model)
        self.lm_head = nn.Linear(model["embed_dim"], model["vocab_size"], bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        **kwargs,
    ):
        if past_key_values is not None:
            raise ValueError("this model has no cache: generate with use_cache=False")
        length, multipliers = input_ids.shape[1], self.config.jaxmoe["multipliers"]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None, :]
        position_ids = position_ids.expand_as(input_ids)
        order = torch.arange(length, device=input_ids.device)
        is_seen = (order[:, None] >= order[None, :])[None, None]
        if attention_mask is not None:
            is_seen = is_seen & attention_mask.bool()[:, None, None, :]
        x = self.model.embed_tokens(input_ids) * multipliers["embedding"]
        for block in self.model.layers:
            x = block(x, position_ids, is_seen)
        logits = self.lm_head(self.model.norm(x)).float() * multipliers["logits"]
        loss = None
        if labels is not None:
            # The trainer says by how many tokens it wants the sum divided where it accumulates.
            count = kwargs.get("num_items_in_batch")
            reduction = "mean" if count is None else "sum"
            rows = logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(rows, labels[:, 1:].flatten(), reduction=reduction)
            if count is not None:
                loss = loss / torch.as_tensor(count, device=loss.device)
        return CausalLMOutput(loss=loss, logits=logits)
'''
