# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes a model as families do: its normal form, the fields that they share, the comparison.

`Family.fields` does not check that the family computes the model: the exporter reads the fields
back and `check_described` compares the result with the model, so that a property without a field is
always found.

Properties that only training uses are not compared: balancers, jitter, and the update of biases.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxmoe.checkpoint.huggingface.parts import FULL, SLIDING, layers_of
from jaxmoe.checkpoint.huggingface.ropes import rope_fields
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import varying_fields
from jaxmoe.layers.context import heads_of
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.mixers.attention_parts import NO_OPTIONS, AttentionOptions
from jaxmoe.models.config import DenseConfig, MixerBase, ModelConfig, MoEConfig
from jaxmoe.routing import LossFreeConfig


def window_of(model: ModelConfig) -> int | None:
    """Return the window of the attention of a model; None: it has none."""
    heads = heads_of(model.attention)
    return None if heads is None else heads.window


def options_of(model: ModelConfig) -> AttentionOptions:
    """Return the options of the attention of a model, neutral ones where it has none."""
    return getattr(model.attention, "extras", NO_OPTIONS)


def latent_fields(model: ModelConfig, family: str, name: str = "latent") -> dict[str, Any]:
    """Return the fields of latent attention.

    Args:
        model: Model in its normal form.
        family: Name of the family, for the message.
        name: Name of the attention that it has.

    Raises:
        CheckpointError: The model has another attention.
    """
    attention: Any = model.attention
    if attention.name != name:
        raise CheckpointError(
            f"{family} has the attention {name}, and model.attention is {attention.name}"
        )
    return {
        "kv_lora_rank": attention.latent_dim,
        "q_lora_rank": attention.query_latent_dim,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "qk_head_dim": attention.head_dim,
        "head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "rope_interleave": attention.rope_layout == "interleaved",
    }


def grouped_expert_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of experts in groups, the shared ones among them; of a model of DeepSeek.

    Args:
        model: Model in its normal form.
    """
    moe = moe_of(model)
    groups = getattr(moe.router, "groups", None)
    return {
        "intermediate_size": model.dense_dim,
        "moe_intermediate_size": moe.expert_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "n_group": groups.num_groups if groups else 1,
        "topk_group": groups.top_groups if groups else 1,
        "norm_topk_prob": moe.gate.name == "renormalized",
        "routed_scaling_factor": getattr(moe.gate, "scale", 1.0),
        "first_k_dense_replace": len(model.dense_layers) if model.moe else model.num_layers,
    }


def multiplier_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the multipliers of Granite.

    Args:
        model: Model in its normal form.
    """
    factors = model.forward_multipliers
    scale = factors.attention_scale
    return {
        "embedding_multiplier": factors.embedding,
        "residual_multiplier": factors.residual,
        "logits_scaling": float(f"{1.0 / factors.logits:.12g}"),  # it was divided once before
        "attention_multiplier": model.attention.head_dim**-0.5 if scale is None else scale,
    }


def bias_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the field of the biases of attention.

    Args:
        model: Model in its normal form.
    """
    attention: Any = model.attention
    return {"attention_bias": attention.extras.has_bias}


def feed_forward_types_of(model: ModelConfig) -> dict[str, Any]:
    """Return `mlp_layer_types`.

    Args:
        model: Model in its normal form.
    """
    is_routed = [kind.feed_forward.is_routed for kind in model.kinds]
    return {"mlp_layer_types": ["sparse" if routed else "dense" for routed in is_routed]}


def layer_types_of(model: ModelConfig) -> dict[str, Any]:
    """Return `layer_types` and the window of the layers that have one.

    Args:
        model: Model in its normal form.
    """
    windows = [getattr(kind.mixer, "window", None) for kind in model.kinds]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def normal_form(model: ModelConfig) -> ModelConfig:
    """Return an equal model as families describe it: at most one attention, one recurrent mixer and
    one dense width, `model.layers` empty where all layers have one mixer and feed-forwards are
    dense or of experts.

    Mixers may differ from layer to layer in their `layer_fields`.

    Parameters of a repeating period have other paths in the normal form.

    Raises:
        CheckpointError: A layer has another mixer of its kind, or another dense width, than those
            before it.
    """
    kinds = [(kind.mixer, kind.feed_forward.sizes) for kind in model.kinds]
    names = [kind.feed_forward.name for kind in model.kinds]
    dense = tuple(index for index, name in enumerate(names) if name == "dense")
    width = kinds[dense[0]][1].dense_dim if dense else model.dense_dim
    firsts: dict[bool, tuple[int, MixerBase]] = {}
    for index, (mixer, sizes) in enumerate(kinds):
        where, first = firsts.setdefault(mixer.is_recurrent, (index, mixer))
        if differences := _differences(mixer, first):
            text = (
                f"layer {index} of model.layers has another mixer ({mixer.name}) than layer {where}"
                f" ({first.name}), and no family of transformers has two"
            )
            if mixer.name == first.name:
                text += ": " + ", ".join(differences)
            raise CheckpointError(text)
        if names[index] == "dense" and sizes.dense_dim != width:
            raise CheckpointError(
                f"layer {index} of model.layers has a dense feed-forward of"
                f" {sizes.dense_dim} and layer {dense[0]} one of {width}, and no family of"
                " transformers has two widths"
            )
    attention = model.attention
    if False in firsts or attention.is_recurrent:
        attention = firsts.get(False, (0, kinds[0][0]))[1]
    feed_forwards = [kind.feed_forward for kind in model.kinds]
    plain = DenseConfig(hidden_dim=width)
    is_usual = all(fed.is_routed or fed == plain for fed in feed_forwards)
    has_experts = any(fed.is_routed for fed in feed_forwards)
    return dataclasses.replace(
        model,
        attention=attention,
        moe=model.moe if has_experts else None,
        dense_layers=dense if has_experts and is_usual else (),
        dense_dim=width,
        layers=layers_of(
            [mixer for mixer, _ in kinds], attention, None if is_usual else feed_forwards
        ),
    )


def _differences(mixer: MixerBase, first: MixerBase) -> list[str]:
    """Return what two mixers differ in beside what families change from layer to layer."""
    if mixer.name != first.name:
        return [mixer.name]
    return [
        f"{path} {ours}, {theirs}"
        for path, (ours, theirs) in varying_fields([mixer, first]).items()
        if path.partition(".")[0] not in mixer.layer_fields
    ]


def check_described(model: ModelConfig, read: ModelConfig, family: str) -> None:
    """Raise if the fields written for a model describe another model.

    Args:
        model: Model to export.
        read: Model that the family reads from the fields.
        family: Name of the family.

    Raises:
        CheckpointError: One line for each config field that differs.
    """
    pair = [_of_inference(model), _of_inference(read)]
    lines = [
        f"  model.{path}: {ours} here, {theirs} in {family}"
        for path, (ours, theirs) in varying_fields(pair).items()
    ]
    biases = [getattr(moe_of(config).router, "bias", None) for config in (model, read)]
    if biases[0] is not None and biases[1] is None and not lines:
        lines.append(f"  model.moe.router.bias: {biases[0].name} here, null in {family}")
    if lines:
        raise CheckpointError(
            f"{family} of transformers does not compute this model, and would return other"
            " logits:\n" + "\n".join(sorted(lines))
        )


def _of_inference(model: ModelConfig) -> ModelConfig:
    """Return the model without properties that change no logit in evaluation, in normal form."""
    scale = model.forward_multipliers.attention_scale
    default_scale = model.attention.head_dim**-0.5
    if scale is not None and math.isclose(scale, default_scale, rel_tol=1e-12):
        multipliers = dataclasses.replace(model.forward_multipliers, attention_scale=None)
        model = dataclasses.replace(model, multipliers=multipliers)
    factors = dataclasses.replace(
        model.forward_multipliers,
        logits=float(f"{model.forward_multipliers.logits:.12g}"),
    )
    model = dataclasses.replace(
        model,
        attention=_mixer_of_inference(model.attention),
        layers=tuple(
            dataclasses.replace(layer, mixer=layer.mixer and _mixer_of_inference(layer.mixer))
            for layer in model.layers
        ),
        multipliers=factors,
    )
    has_dense = model.moe is None or bool(model.dense_layers)
    if not has_dense:
        model = dataclasses.replace(model, dense_dim=1)
    if model.moe is None:
        return model
    router: Any = model.moe.router
    if getattr(router, "jitter", 0.0):
        router = dataclasses.replace(router, jitter=0.0)
    bias = getattr(router, "bias", None)
    if router.score_function == "softmax" and bias and bias.traits.is_score_correction:
        router = dataclasses.replace(router, bias=LossFreeConfig())
    if router.score_function == "sigmoid":
        if router.bias is None or router.bias.traits.is_score_correction:
            router = dataclasses.replace(router, bias=LossFreeConfig())
        groups = router.groups
        if groups is not None and groups.top_groups == groups.num_groups:
            router = dataclasses.replace(router, groups=None)
        elif groups is not None and groups.best_per_group is None:
            size = model.moe.num_experts // groups.num_groups
            best = min(max(1, model.moe.top_k // groups.top_groups), size)
            groups = dataclasses.replace(groups, best_per_group=best)
            router = dataclasses.replace(router, groups=groups)
    capacity = model.moe.capacity
    if capacity is not None and capacity.traits.is_for_training:
        capacity = None
    moe = dataclasses.replace(
        model.moe, balancers=(), router=router, capacity=capacity, **_shared_branch(model.moe)
    )
    return dataclasses.replace(model, moe=moe)


def _shared_branch(moe: MoEConfig) -> dict[str, Any]:
    """Return the fields of the shared branch, whose width may be written in two ways."""
    units = moe.num_shared_units
    if not units:
        return {}
    is_multiple = units % moe.expert_dim == 0
    options = dataclasses.replace(moe.extras, shared_dim=None if is_multiple else units)
    return {
        "num_shared_experts": units // moe.expert_dim if is_multiple else 1,
        "options": None if options == MoEOptions() else options,
    }


def _mixer_of_inference(mixer: Any) -> Any:
    """Return a mixer without what changes only its speed, or nothing."""
    if mixer.is_recurrent:
        return dataclasses.replace(mixer, chunk=1) if hasattr(mixer, "chunk") else mixer
    if getattr(mixer, "positions", "rotary") == "none":
        layout = {"rope_layout": "halves"} if hasattr(mixer, "rope_layout") else {}
        return dataclasses.replace(mixer, rope_theta=1.0, **layout)
    return mixer


def moe_of(model: ModelConfig) -> MoEConfig:
    """Return the config of the MoE layers; a placeholder where all layers are dense."""
    return model.moe or MoEConfig(num_shared_experts=1)


def balance_of(model: ModelConfig) -> float:
    """Return router_aux_loss_coef.

    The loss of transformers is K for a balanced router and covers all layers together; the loss
    here is 1 and is added over layers.
    """
    for balancer in moe_of(model).balancers if model.num_moe_layers else ():
        if balancer.traits.is_auxiliary_loss:
            return balancer.coefficient * model.num_moe_layers / moe_of(model).top_k
    return 0.0


def shared_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that all families have."""
    attention: Any = model.attention
    options = getattr(attention, "extras", None)
    share = 1.0
    scaling = getattr(attention, "yarn", None)
    if options is not None:
        share = options.rope_dim(attention.head_dim) / attention.head_dim
        scaling = options.rope_scaling
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "num_experts_per_tok": moe_of(model).top_k,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        **rope_fields(attention.rope_theta, share, scaling),
        "tie_word_embeddings": model.has_tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
