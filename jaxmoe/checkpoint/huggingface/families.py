# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Families of `transformers`: what their config means here, and where their tensors belong.

    olmoe        softmax over all experts, not renormalised (norm_topk_prob); QK-norm over all heads
    mixtral      softmax over the chosen experts; no QK-norm; on disk block_sparse_moe, w1, w3, w2
    qwen3_moe    softmax over all experts, norm_topk_prob; QK-norm over each head; dense layers by
                 mlp_only_layers and decoder_sparse_step

Version 4 writes a flat rope_theta, version 5 rope_parameters; Qwen3-MoE's num_experts became
num_local_experts. Either is read. What this library does not compute is refused, never ignored; a
field that is not known here at all is named in a warning.

Checked against transformers 5.23.0.

To add a family: a function from fields to ModelConfig, its rules, and a line in FAMILIES. The rules
are meant to serve both directions; what they cannot say yet (a bias per expert, two tensors for one
projection as in DeepSeek-V3) belongs into `Rule`, not into a family.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from jaxmoe.checkpoint.huggingface.weights import EMBEDDING, HEAD, Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.routing import (
    METHODS,
    LoadBalanceConfig,
    RenormalizedGateConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
)

logger = logging.getLogger(__name__)

# Fields of which one value is supported, and why no other.
_ONLY: Final = {
    "hidden_act": ("silu", "every feed-forward here is a SwiGLU"),
    "attention_bias": (False, "projections here have no bias"),
    "mlp_bias": (False, "projections here have no bias"),
    "clip_qkv": (None, "queries, keys and values are not clipped here"),
    "attention_dropout": (0.0, "there is no dropout here; set it to 0 if it was used in training"),
    "router_jitter_noise": (0.0, "this router has no noise; set it to 0 if it was for training"),
    "partial_rotary_factor": (1.0, "RoPE here turns whole heads"),
    "quantization_config": (None, "quantised weights are not read: convert them to bfloat16"),
    "is_encoder_decoder": (False, "models here are decoders"),
}

# Fields that change neither logits nor loss.
_IGNORED: Final = frozenset(
    "architectures _name_or_path transformers_version torch_dtype dtype auto_map use_cache"
    " _attn_implementation _attn_implementation_autoset attn_implementation"
    " _experts_implementation experts_implementation initializer_range max_position_embeddings"
    " max_window_layers output_router_logits output_attentions output_hidden_states return_dict"
    " pad_token_id bos_token_id eos_token_id chunk_size_feed_forward problem_type id2label label2id"
    " pretraining_tp rope_parameters rope_scaling rope_theta model_type".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture of `transformers`."""

    model: Callable[[Mapping[str, Any]], ModelConfig]
    rules: tuple[Rule, ...]


class _Fields:
    """The fields of a config, and which of them were asked for."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self._asked: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of a field that has had several names; `default` where absent or null.

        Raises:
            CheckpointError: two of the names are there with different values.
        """
        self._asked.update(names)
        given = {name: self._fields[name] for name in names if self._fields.get(name) is not None}
        if len(set(map(repr, given.values()))) > 1:
            both = " and ".join(f"{name}={value!r}" for name, value in given.items())
            raise CheckpointError(f"the config has {both}, two names of one field")
        return next(iter(given.values()), default)

    def there(self, *names: str) -> Any:
        """A field that must be there."""
        value = self.get(*names)
        if value is None:
            near = closest(names[0], self._fields)
            raise CheckpointError(f"the config has no {' or '.join(names)}{near}")
        return value

    def size(self, *names: str) -> int:
        """A field that must be there, a whole number above 0."""
        value = self.there(*names)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.{names[0]}={value!r} must be a whole number above 0")
        return value

    def only(self, name: str, supported: Any, why: str) -> None:
        """Refuses any value of a field but one (null counts as absent)."""
        value = self.get(name, default=supported)
        if value != supported:
            raise CheckpointError(
                f"config.{name}={value!r} is not supported, only {supported!r}: {why}"
            )

    def warn_of_the_rest(self) -> None:
        """Names the fields that nobody asked for and that are not known to be harmless."""
        rest = sorted(self._fields.keys() - self._asked - _IGNORED)
        if rest:
            logger.warning("config fields unknown to jaxmoe, ignored: %s", ", ".join(rest))


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family that a config belongs to.

    Raises:
        CheckpointError: none that is known here.
    """
    name = fields.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(
            f"config.model_type={name!r} is not among {', '.join(FAMILIES)}"
            + closest(str(name), FAMILIES)
        )
    return FAMILIES[name]


def _olmoe(config: Mapping[str, Any]) -> ModelConfig:
    fields = _Fields(config)
    moe = _token_choice(fields, expert_dim=fields.size("intermediate_size"))
    fields.only("sliding_window", None, "OLMoE attends to all earlier tokens")
    return _model(fields, moe, qk_norm="full", rope_theta=10_000.0, window=None)


def _mixtral(config: Mapping[str, Any]) -> ModelConfig:
    fields = _Fields(config)
    parts = METHODS["mixtral"]
    moe = _moe(fields, fields.size("intermediate_size"), parts.router, parts.gate)
    window = fields.get("sliding_window")
    return _model(fields, moe, qk_norm="none", rope_theta=1e6, window=window)


def _qwen3_moe(config: Mapping[str, Any]) -> ModelConfig:
    fields = _Fields(config)
    moe = _token_choice(fields, expert_dim=fields.size("moe_intermediate_size"))
    window = fields.get("sliding_window")  # means nothing without use_sliding_window
    window = window if fields.get("use_sliding_window") else None
    num_layers, step = fields.size("num_hidden_layers"), fields.get("decoder_sparse_step") or 1
    named = fields.get("mlp_only_layers") or ()
    dense = tuple(i for i in range(num_layers) if i in named or (i + 1) % step)
    return _model(fields, moe, qk_norm="head", rope_theta=10_000.0, window=window, dense=dense)


def _token_choice(fields: _Fields, expert_dim: int) -> MoEConfig:
    """Softmax over all experts; norm_topk_prob divides by the sum over the chosen."""
    is_renormalized = fields.get("norm_topk_prob", default=False)
    gate = RenormalizedGateConfig() if is_renormalized else SoftmaxGateConfig()
    return _moe(fields, expert_dim, SoftmaxTopKConfig(softmax="before"), gate)


def _moe(fields: _Fields, expert_dim: int, router: Any, gate: Any) -> MoEConfig:
    return MoEConfig(
        num_experts=fields.size("num_local_experts", "num_experts"),
        top_k=fields.size("num_experts_per_tok"),
        expert_dim=expert_dim,
        router=router,
        gate=gate,
        balancers=(),
    )


def _model(
    fields: _Fields,
    moe: MoEConfig,
    *,
    qk_norm: Literal["none", "head", "full"],
    rope_theta: float,
    window: int | None,
    dense: tuple[int, ...] = (),
) -> ModelConfig:
    """What the families share; `rope_theta` is the default of theirs."""
    for name, (supported, why) in _ONLY.items():
        fields.only(name, supported, why)
    num_layers, width = fields.size("num_hidden_layers"), fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    if fields.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"config.hidden_size={width} does not divide by num_attention_heads={heads}, and there"
            " is no head_dim"
        )
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", default=heads),
        head_dim=fields.get("head_dim", default=width // heads),
        qk_norm=qk_norm,
        rope_theta=_rope_theta(fields, rope_theta),
        window=window,
    )
    coefficient = fields.get("router_aux_loss_coef", default=0.0)
    model = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        embed_dim=width,
        attention=attention,
        moe=None if len(dense) == num_layers else moe,
        dense_layers=() if len(dense) == num_layers else dense,
        dense_dim=fields.size("intermediate_size"),
        norm_epsilon=fields.there("rms_norm_eps"),
        has_tied_embeddings=fields.get("tie_word_embeddings", default=False),
    )
    fields.warn_of_the_rest()
    if model.moe is None:
        return model
    # Theirs is K for a balanced router and one for all layers, ours 1 for each layer.
    unit = moe.top_k / model.num_moe_layers
    balancers = (LoadBalanceConfig(coefficient=coefficient * unit),)
    return dataclasses.replace(model, moe=dataclasses.replace(moe, balancers=balancers))


def _rope_theta(fields: _Fields, default: float) -> float:
    """The base of plain RoPE, wherever the config keeps it.

    Raises:
        CheckpointError: another kind of RoPE, or two different bases.
    """
    bases = {fields.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name, default={})
        kind = rope.get("rope_type", rope.get("type", "default"))
        by_layer = any(isinstance(value, Mapping) for value in rope.values())
        if kind != "default" or by_layer or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"config.{name}={dict(rope)} is not supported: RoPE here is the plain one, of type"
                " 'default', the same in all layers and for whole heads"
            )
        bases.add(rope.get("rope_theta"))
    bases.discard(None)
    if len(bases) > 1:
        raise CheckpointError(f"the config has several rope_theta: {sorted(bases)}")
    return float(bases.pop()) if bases else default


_BLOCK = "model.layers.{layer}."


def _rule(path: str, *keys: str, half: int | None = None) -> Rule:
    return Rule(path=path, keys=tuple(_BLOCK + key for key in keys), half=half)


_ROOT = (
    Rule(path="embedding/weight", keys=(EMBEDDING,), is_transposed=False),
    Rule(path="final_norm/gain", keys=("model.norm.weight",)),
    Rule(path="head/weight", keys=(HEAD,)),
)
_ATTENTION = (
    _rule("attention_norm/gain", "input_layernorm.weight"),
    *(_rule(f"attention/{name}", f"self_attn.{name}_proj.weight") for name in "qkvo"),
    _rule("feed_forward_norm/gain", "post_attention_layernorm.weight"),
)
_QK_NORM = tuple(
    _rule(f"attention/{name}", f"self_attn.{name}.weight") for name in ("q_norm", "k_norm")
)
_DENSE = (
    _rule("feed_forward/gate_up", "mlp.gate_proj.weight", half=0),
    _rule("feed_forward/gate_up", "mlp.up_proj.weight", half=1),
    _rule("feed_forward/down", "mlp.down_proj.weight"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Router and experts, on disk under the names given, in memory stacked."""
    expert = f"{block}.experts.{{expert}}."
    in_memory = "mlp.experts.gate_up_proj"
    return (
        _rule("moe/router/weight", f"{block}.gate.weight", "mlp.gate.weight"),
        _rule("moe/experts/gate_up", f"{expert}{gate}.weight", in_memory, half=0),
        _rule("moe/experts/gate_up", f"{expert}{up}.weight", in_memory, half=1),
        _rule("moe/experts/down", f"{expert}{down}.weight", "mlp.experts.down_proj"),
    )


_PROJECTIONS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_NUMBERED = _experts("block_sparse_moe", "w1", "w3", "w2")

FAMILIES: Final[dict[str, Family]] = {
    "olmoe": Family(model=_olmoe, rules=(*_ROOT, *_ATTENTION, *_QK_NORM, *_PROJECTIONS)),
    "mixtral": Family(model=_mixtral, rules=(*_ROOT, *_ATTENTION, *_NUMBERED)),
    "qwen3_moe": Family(
        model=_qwen3_moe, rules=(*_ROOT, *_ATTENTION, *_QK_NORM, *_DENSE, *_PROJECTIONS)
    ),
}
