# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MiniMax-01: lightning attention and attention by layer_types, experts (arXiv 2501.08313).

A half adds its output to the norm of the stream, each with a factor. Decays fall with the number of
the layer, and transformers stores them beside the parameters. The chunk is block_size.

Longer than 120 lines: lightning attention has no option that stores its decays, which are computed
here for the files.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of, shared_fields, window_of
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import recurrent_mixer
from jaxmoe.checkpoint.huggingface.family import Constant, Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import PROJECTIONS, ROOT, experts, norms, rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.contrib.linear_attention.lightning import LightningConfig
from jaxmoe.layers.residual import WeightedResidualConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import METHODS

_LINEAR = "linear_attention"
_QKV = ("lightning/q", "lightning/k", "lightning/v")
_FACTORS = {
    "mixer_stream": "{kind}_alpha_factor",
    "mixer_branch": "{kind}_beta_factor",
    "feed_forward_stream": "mlp_alpha_factor",
    "feed_forward_branch": "mlp_beta_factor",
}
_ATTENTIONS = {False: "full_attn", True: "linear_attn"}
"""Names of attention in the names of factors, of lightning attention last."""
_EPSILON = 1e-5
"""Term in the decays, of which the first layer has 1 + this much."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MiniMaxFamily(Family):
    """MiniMax-01."""

    name: ClassVar[str] = "minimax"
    architecture: ClassVar[str] = "MiniMaxForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    recurrent: ClassVar[str | None] = "lightning"
    rules = (
        *ROOT,
        *norms(("attention", "lightning"), "post_attention_layernorm"),
        *PROJECTIONS,
        *(rule(path, "self_attn.qkv_proj.weight", fused=_QKV, heads_of=_QKV[0]) for path in _QKV),
        rule("lightning/z", "self_attn.output_gate.weight"),
        rule("lightning/norm", "self_attn.norm.weight", layout="flat"),
        rule("lightning/o", "self_attn.out_proj.weight"),
        *experts("block_sparse_moe", ("w1", "w3", "w2")),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields({"router_aux_loss_coef": 0.001, **config})
        count = fields.size("num_hidden_layers")
        default = [_LINEAR if layer % 2 else parts.FULL for layer in range(count)]
        kinds = parts.named_layers(fields, "layer_types", (_LINEAR, parts.FULL), default)
        window = fields.get("sliding_window")
        attention = parts.grouped_attention(fields, qk_norm="none", rope_theta=1e6, window=window)
        lightning = LightningConfig(
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            decay_layers=count,
            chunk=fields.get("block_size", default=256),
        )
        mixers = [lightning if kind == _LINEAR else attention for kind in kinds]
        mixers = LightningConfig.number_layers(mixers)
        method = METHODS["mixtral"]
        width = fields.size("intermediate_size")
        residual = _residual(fields, {kind == _LINEAR for kind in kinds})
        model = parts.assemble(
            fields,
            parts.experts(fields, width, method.router, method.gate),
            attention,
            layers=parts.layers_of(mixers, attention),
        )
        return dataclasses.replace(model, residual=residual)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        mixer = recurrent_mixer(model, LightningConfig(chunk=256))
        moe = moe_of(model)
        factors = {
            name.format(kind=kind): getattr(model.residual, field, 1.0)
            for field, name in _FACTORS.items()
            for kind in _ATTENTIONS.values()
        }
        kinds = [kind.mixer.is_recurrent for kind in model.kinds]
        return (
            shared_fields(model)
            | factors
            | {
                "head_dim": model.attention.head_dim,
                "layer_types": [_LINEAR if is_recurrent else parts.FULL for is_recurrent in kinds],
                "block_size": mixer.chunk,
                "intermediate_size": moe.expert_dim,
                "num_local_experts": moe.num_experts,
                "router_aux_loss_coef": balance_of(model),
                "router_jitter_noise": 0.0,
                "sliding_window": window_of(model),
            }
        )

    def constants(self, model: ModelConfig) -> Mapping[str, Constant]:
        """Return the decays of the layers, as transformers stores them."""
        tensors = {}
        for layer, kind in enumerate(model.kinds):
            if kind.mixer.is_recurrent:
                mixer: Any = kind.mixer
                shapes = _shapes(mixer.num_heads, mixer.chunk)
                for name, shape in shapes.items():
                    values = functools.partial(_decays, model.num_layers, layer, shapes, name)
                    tensors[f"model.layers.{layer}.self_attn.{name}"] = Constant(shape, values)
        return tensors


def _residual(fields: Fields, attentions: set[bool]) -> WeightedResidualConfig:
    """Return how halves add their outputs, with the factors of the attentions that there are."""
    factors = {}
    for field, name in _FACTORS.items():
        names = [name.format(kind=kind) for kind in _ATTENTIONS.values()]
        values = [float(fields.get(name, default=1.0)) for name in names]
        if len(attentions) == 2 and values[0] != values[1]:
            raise CheckpointError(
                f"config.{names[0]}={values[0]} and config.{names[1]}={values[1]} differ, and"
                " model.residual has one factor for the mixers of all layers"
            )
        factors[field] = values[max(attentions)]
    return WeightedResidualConfig(adds_to_norm=True, **factors)


def _shapes(heads: int, block: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of decays of a layer."""
    return {
        "slope_rate": (heads, 1, 1),
        "query_decay": (heads, block, 1),
        "key_decay": (heads, block, 1),
        "diagonal_decay": (1, heads, block, block),
    }


def _decays(
    num_layers: int, layer: int, shapes: Mapping[str, tuple[int, ...]], name: str
) -> np.ndarray:
    """Return a tensor of decays, f32.

    Args:
        num_layers: Layers of the model.
        layer: Number of the layer.
        shapes: Shapes of all tensors of the layer.
        name: Name of the tensor.
    """
    heads, block, _ = shapes["query_decay"]
    share = 1.0 - layer / (num_layers - 1 + _EPSILON) + _EPSILON
    rates = 2.0 ** (-8.0 / heads * np.arange(1, heads + 1)) * share
    places = np.arange(block)
    distances = {
        "query_decay": places[:, None] + 1,
        "key_decay": block - 1 - places[:, None],
        "diagonal_decay": places[:, None] - places,
    }
    if name == "slope_rate":
        return rates[:, None, None].astype(np.float32)
    distance = np.where(distances[name] < 0, np.inf, distances[name])
    decays = np.exp(-rates[:, None, None] * distance)
    return decays.astype(np.float32).reshape(shapes[name])
