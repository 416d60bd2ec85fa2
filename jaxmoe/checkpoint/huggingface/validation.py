# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the types and sizes of a config before anything is computed or allocated from them.

`check_fields` compares the fields of config.json with the types in `_RULES`; `check_sizes` compares
the sizes of the model with the shapes of the tensors, which come from the headers of their files.
Which values this library computes is the subject of `fields.py`.

To add a field: `jaxmoe/checkpoint/huggingface/validation.py` (`_RULES`),
`tests/jaxmoe/checkpoint/huggingface/test_hostile.py` (a row with a wrong type).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from jaxmoe.checkpoint.huggingface import modeling
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.weights import EMBEDDINGS, Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig

MAX_SIZE: Final = (1 << 31) - 1
"""Largest width: arrays are indexed by 32 bits."""
MAX_LAYERS: Final = 4096
MAX_HEAD_DIM: Final = 1 << 16
MAX_EXPERTS: Final = 1 << 20
"""Largest number of experts of all layers together."""


class _SizeRule(NamedTuple):
    """Type of fields; null, like an absent field, is allowed by all of them."""

    rule: str
    fits: Callable[[Any], bool]
    names: str
    """Names of the fields, separated by spaces."""


def _integer(least: int, most: int, names: str) -> _SizeRule:
    kind = "an integer above 0" if least == 1 else f"an integer, {least} or more,"
    rule = f"{kind} and at most {most}"
    return _SizeRule(rule, lambda value: type(value) is int and least <= value <= most, names)


def _is_finite(value: Any) -> bool:
    # Integers are compared, not converted: they may be larger than any float.
    return type(value) in (int, float) and abs(value) <= 1e300


def _is_token(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_SIZE


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_SIZE


_RULES: Final = (
    _integer(1, MAX_LAYERS, "num_hidden_layers n_layers num_layers"),
    _integer(
        0,
        MAX_LAYERS,
        "num_nextn_predict_layers num_mtp_layers first_k_dense_replace num_dense_layers",
    ),
    _integer(
        1,
        MAX_EXPERTS,
        "num_experts n_routed_experts num_experts_per_tok moe_num_experts moe_top_k moe_k",
    ),
    _integer(0, MAX_EXPERTS, "num_local_experts moe_num_shared_experts zero_expert_num"),
    _integer(1, MAX_LAYERS, "attn_layer_period expert_layer_period moe_layer_interval"),
    _integer(0, MAX_LAYERS, "attn_layer_offset expert_layer_offset moe_layer_start_index"),
    _integer(-1, MAX_LAYERS, "moe_layer_end_index"),
    _integer(
        1,
        MAX_SIZE,
        "vocab_size hidden_size intermediate_size num_attention_heads"
        " num_key_value_heads head_dim qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim"
        " kv_lora_rank q_lora_rank n_shared_experts n_group topk_group"
        " max_position_embeddings mamba_expand mamba_d_state mamba_d_conv mamba_n_heads"
        " mamba_n_groups mamba_chunk_size d_model n_heads max_seq_len kv_n_heads ffn_hidden_size"
        " prefix_dense_intermediate_size prefix_dense_sliding_window_pattern"
        " global_attn_every_n_layers shared_expert_intermediate_size rotary_dim"
        " intermediate_size_mlp attention_chunk_size floor_scale no_rope_layer_interval"
        " interleave_moe_layer_step",
    ),
    _integer(
        0,
        MAX_SIZE,
        "sliding_window decoder_sparse_step shared_intermediate_size num_shared_experts"
        " max_window_layers",
    ),
    # Of Nemotron-H.
    _integer(
        1,
        MAX_SIZE,
        "ssm_state_size mamba_num_heads mamba_head_dim n_groups conv_kernel chunk_size expand"
        " moe_shared_expert_intermediate_size",
    ),
    _SizeRule("a string", lambda value: isinstance(value, str), "hybrid_override_pattern"),
    _SizeRule("true or false", lambda value: isinstance(value, bool), "use_conv_bias mlp_bias"),
    # Of families with linear attention.
    _integer(
        1,
        MAX_SIZE,
        "conv_L_cache full_attention_interval"
        " linear_num_value_heads linear_num_key_heads linear_value_head_dim linear_key_head_dim"
        " linear_conv_kernel_dim block_size linear_num_heads linear_head_dim num_experts_per_token"
        " num_expert_group model_max_length expert_ffn_hidden_size"
        " index_n_heads index_head_dim index_topk sliding_window_size layer_group_size"
        " group_norm_size short_conv_kernel_size kv_channels",
    ),
    _SizeRule("a finite number above 0", lambda value: _is_finite(value) and value > 0, "norm_eps"),
    _SizeRule(
        "a finite number",
        _is_finite,
        "full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor"
        " linear_attn_beta_factor mlp_alpha_factor mlp_beta_factor kda_lower_bound",
    ),
    _SizeRule(
        "true or false",
        lambda value: isinstance(value, bool),
        "conv_bias use_expert_bias tie_embedding moe_renormalize mla_use_nope kda_safe_gate"
        " use_qkv_bias",
    ),
    _SizeRule("an object", lambda value: isinstance(value, Mapping), "linear_attn_config"),
    _SizeRule(
        "a finite number above 0",
        lambda value: _is_finite(value) and value > 0,
        "rms_norm_eps rope_theta embedding_multiplier residual_multiplier logits_scaling"
        " attention_multiplier clip_qkv moe_normalize_expert_weights layer_norm_eps logit_scale"
        " layer_norm_epsilon"
        " swiglu_limit swiglu_alpha moe_norm_min attn_scale",
    ),
    _SizeRule(
        "a finite number",
        _is_finite,
        "router_aux_loss_coef routed_scaling_factor moe_loss_weight route_scale"
        " router_jitter_noise",
    ),
    _SizeRule(
        "true or false",
        lambda value: isinstance(value, bool),
        "norm_topk_prob tie_word_embeddings use_sliding_window rope_interleave mamba_conv_bias"
        " mamba_proj_bias attention_bias mup_enabled lm_head_bias qkv_bias use_qk_norm use_bias"
        " attn_temperature_tuning",
    ),
    _SizeRule(
        "a string", lambda value: isinstance(value, str), "model_type position_embedding_type"
    ),
    _SizeRule(
        "an integer above 0 or 'auto'",
        lambda value: value == "auto" or (type(value) is int and 0 < value <= MAX_SIZE),
        "mamba_dt_rank mamba_d_head",
    ),
    _SizeRule(
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        "layer_types layers_block_type mlp_layer_types",
    ),
    _SizeRule(
        "a list of two numbers",
        lambda value: isinstance(value, list | tuple) and len(value) == 2,
        "time_step_limit",
    ),
    _SizeRule(
        "an object",
        lambda value: isinstance(value, Mapping),
        "rope_parameters rope_scaling jaxmoe attn_config ffn_config ffn_act_fn",
    ),
    _SizeRule(
        f"an integer above 0 and at most {MAX_SIZE}, or a list of them",
        lambda value: all(map(_is_size, value if isinstance(value, list) else [value])),
        "moe_intermediate_size moe_topk num_shared_expert",
    ),
    _SizeRule(
        "a list of layers",
        lambda value: isinstance(value, list | tuple) and all(type(i) is int for i in value),
        "mlp_only_layers moe_layers no_rope_layers",
    ),
    _SizeRule(
        "a token id or a list of them",
        lambda value: all(map(_is_token, value if isinstance(value, list | tuple) else [value])),
        "bos_token_id eos_token_id",
    ),
)
_OF_ROPE: Final = (
    _SizeRule("a string", lambda value: isinstance(value, str), "rope_type type"),
    _SizeRule(
        "0 or a number from 1e-9 to 1e12",
        lambda value: type(value) in (int, float) and (value == 0 or 1e-9 <= value <= 1e12),
        "rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale"
        " mscale_all_dim partial_rotary_factor alpha low_freq_factor high_freq_factor"
        " short_mscale long_mscale attention_factor",
    ),
)
_LAYER = re.compile(r"(?:model\.layers|transformer\.blocks|backbone\.layers)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SIZES: Final = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "d_model"),
    "layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "experts": (
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "ffn_config",
    ),
    "head": ("head_dim", "qk_rope_head_dim", "hidden_size", "d_model"),
}
"""Names of sizes in the families."""
_OWN_SIZES: Final = {
    "vocabulary": ("jaxmoe.vocab_size",),
    "width": ("jaxmoe.embed_dim",),
    "layers": ("jaxmoe.num_layers",),
    "experts": ("jaxmoe.moe.num_experts",),
    "head": ("jaxmoe.attention.head_dim",),
}
"""Names of the same sizes in a model with its own modelling file."""
_STACKED = (
    ".experts.gate_up_proj",
    ".experts.up_proj",
    ".experts.down_proj",
    ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.output_linear.weight",
)


def check_fields(fields: Mapping[str, Any], where: str = "") -> None:
    """Raise for a field of a wrong type or beyond any size.

    Args:
        fields: Fields of config.json.
        where: Prefix of messages: the file.

    Raises:
        CheckpointError: See above.
    """
    _check(fields, _RULES, f"{where}config.")
    for name in ("rope_parameters", "rope_scaling"):
        _check(fields.get(name) or {}, _OF_ROPE, f"{where}config.{name}.")
    for name in ("attn_config", "ffn_config"):
        _check(fields.get(name) or {}, _RULES, f"{where}config.{name}.")
    for path, value in _numbers(fields.get("jaxmoe"), "jaxmoe"):
        is_seed = path.endswith("seed")
        if not _is_finite(value) or (type(value) is int and value > MAX_SIZE and not is_seed):
            raise CheckpointError(
                f"{where}config.{path}={show_value(value)} must be a finite number, and at most"
                f" {MAX_SIZE} if it is an integer: correct it"
            )


def _check(fields: Mapping[str, Any], rules: tuple[_SizeRule, ...], prefix: str) -> None:
    for rule in rules:
        for name in rule.names.split():
            value = fields.get(name)
            if value is not None and not rule.fits(value):
                raise CheckpointError(
                    f"{prefix}{name}={show_value(value)} must be {rule.rule}: correct it, or"
                    " download the file again"
                )


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers in a JSON value with their dotted paths."""
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _numbers(inside, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, inside in enumerate(value):
            yield from _numbers(inside, f"{path}.{number}")
    elif type(value) in (int, float):
        yield path, value


def check_sizes(
    model: ModelConfig,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Any],
    rules: Sequence[Rule] = (),
    where: str = "",
) -> None:
    """Raise if the model is larger than its tensors, before its parameters are listed.

    Compares the vocabulary, the width and the numbers of layers and experts. Other shapes are
    compared tensor by tensor in `weights.py`, once the number of parameters is known to be small.

    Args:
        model: Model of the fields.
        fields: Fields of config.json.
        tensors: Tensors by name, with shapes.
        rules: Rules of the model's family.
        where: Prefix of messages: the file.

    Raises:
        CheckpointError: See above.
    """

    # A number in the names of tensors is that of a layer, or of a pair of layers.
    is_paired = any("{pair}" in key for rule in rules for key in rule.keys)
    first = next(_too_large(model, tensors, 2 if is_paired else 1), None)
    if first is None:
        return
    what, size, origin = first
    names = (_OWN_SIZES if fields.get("model_type") == modeling.NAME else _SIZES)[what]
    name = next((name for name in names if name in fields), names[0])
    raise CheckpointError(
        f"{where}config.{name}={size}, and {origin}: give the config.json that was saved with the"
        " tensors"
    )


def _too_large(
    model: ModelConfig, tensors: Mapping[str, Any], layers_per_number: int
) -> Iterator[tuple[str, int, str]]:
    """Yield what differs: the name of a size, its value in the config, and what was found."""
    num_layers = model.num_layers // layers_per_number
    num_experts = model.moe.num_experts if model.moe else 0
    if num_layers > MAX_LAYERS:
        yield "layers", num_layers, f"at most {MAX_LAYERS} layers are read"
    if num_layers * num_experts > MAX_EXPERTS:
        yield "experts", num_experts, f"{num_layers} layers of them exceed {MAX_EXPERTS} experts"
    head_dim = max((heads.head_dim for heads in model.context.heads), default=0)
    if head_dim > MAX_HEAD_DIM:
        yield "head", head_dim, f"heads of at most {MAX_HEAD_DIM} are read"
    embedding = next((name for name in EMBEDDINGS if name in tensors), None)
    shape = tuple(tensors[embedding].shape) if embedding else ()
    if len(shape) == 2:
        origin = f"{embedding} is {list(shape)}"
        if model.vocab_size != shape[0]:
            yield "vocabulary", model.vocab_size, origin
        if model.embed_dim != shape[1]:
            yield "width", model.embed_dim, origin
    layers = {match[1] for name in tensors if (match := _LAYER.match(name))}
    if layers and num_layers > len(layers):
        yield "layers", num_layers, f"the tensors are of {len(layers)} layers"
    experts = _experts_of(tensors)
    if experts and num_experts > experts:
        yield "experts", num_experts, f"the tensors are of {experts} experts"


def _experts_of(tensors: Mapping[str, Any]) -> int:
    """Return the number of experts that tensors name or stack; 0 if there are none."""
    numbers = {match[1] for name in tensors if (match := _EXPERT.search(name))}
    stacked = [
        int(tensor.shape[0])
        for name, tensor in tensors.items()
        if name.endswith(_STACKED) and math.prod(tensor.shape)
    ]
    return max([len(numbers), *stacked])
