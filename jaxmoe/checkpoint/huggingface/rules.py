# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names the tensors of the parameters that several families share."""

from __future__ import annotations

from typing import Any

from jaxmoe.checkpoint.huggingface.weights import EMBEDDING, HEAD, ROUTER_STATE, Rule

_BLOCK = "model.layers.{layer}."


def rule(path: str, *keys: str, **options: Any) -> Rule:
    """Return the rule of a parameter of a block.

    Args:
        path: Path from the block.
        *keys: Names of the tensor after those of the block.
        **options: Further fields of the rule.
    """
    return Rule(path=path, keys=tuple(_BLOCK + key for key in keys), **options)


def root(norm: str) -> tuple[Rule, ...]:
    """Return the rules outside blocks.

    Args:
        norm: Name of the final norm.
    """
    return (
        Rule(path="embedding/weight", keys=(EMBEDDING,), layout="in_out"),
        Rule(path="final_norm/gain", keys=(f"model.{norm}.weight",)),
        Rule(path="head/weight", keys=(HEAD,)),
    )


def norms(mixers: tuple[str, ...], second: str) -> tuple[Rule, ...]:
    """Return the rules of the norms of a block.

    Args:
        mixers: Names of the modules of mixers.
        second: Name of the norm before the feed-forward.
    """
    firsts = (rule(f"{name}_norm/gain", "input_layernorm.weight") for name in mixers)
    return (*firsts, rule("feed_forward_norm/gain", f"{second}.weight"))


def norms_after(second: str, third: str) -> tuple[Rule, ...]:
    """Return the rules of norms of what the halves of a block add to the stream.

    Args:
        second: Name of the norm after attention.
        third: Name of the norm after the feed-forward.
    """
    return (
        rule("attention_post_norm/gain", f"{second}.weight"),
        rule("feed_forward_post_norm/gain", f"{third}.weight"),
    )


ROOT = root("norm")
NORMS = norms(("attention",), "post_attention_layernorm")
PROJECTIONS = tuple(rule(f"attention/{name}", f"self_attn.{name}_proj.weight") for name in "qkvo")
ATTENTION = (*NORMS, *PROJECTIONS)
QK_NORM = tuple(
    rule(f"attention/{name}", f"self_attn.{name}.weight") for name in ("q_norm", "k_norm")
)
QKV_BIAS = tuple(
    rule(f"attention/{name}_bias", f"self_attn.{name}_proj.bias", layout="flat") for name in "qkv"
)
OUTPUT_BIAS = rule("attention/o_bias", "self_attn.o_proj.bias")
ATTENTION_BIASES = (*QKV_BIAS, OUTPUT_BIAS)
LATENT_ATTENTION = (
    *NORMS,
    *(
        rule(f"attention/{ours}", f"self_attn.{theirs}.weight")
        for ours, theirs in {
            "q": "q_proj",
            "q_a": "q_a_proj",
            "q_norm": "q_a_layernorm",
            "q_b": "q_b_proj",
            "kv_a": "kv_a_proj_with_mqa",
            "kv_norm": "kv_a_layernorm",
            "kv_b": "kv_b_proj",
            "o": "o_proj",
        }.items()
    ),
)


def swiglu(path: str, block: str) -> tuple[Rule, ...]:
    """Return the rules of a SwiGLU with three tensors.

    Args:
        path: Path from the block.
        block: Name of its module after that of the block.
    """
    return (
        rule(f"{path}/gate_up", f"{block}.gate_proj.weight", half=0),
        rule(f"{path}/gate_up", f"{block}.up_proj.weight", half=1),
        rule(f"{path}/down", f"{block}.down_proj.weight"),
    )


DENSE = swiglu("feed_forward", "mlp")
SHARED = swiglu("moe/shared", "mlp.shared_experts")
BIAS = rule(f"{ROUTER_STATE}/bias", "mlp.gate.e_score_correction_bias")


def experts(
    block: str,
    names: tuple[str, str, str],
    *,
    router: str = "gate",
    in_memory: str = "mlp",
    router_in_memory: str | None = None,
) -> tuple[Rule, ...]:
    """Return rules for router and experts: separate tensors on disk, stacked in memory.

    Args:
        block: Name of the module on disk.
        names: Names of gate, up and down.
        router: Name of the router.
        in_memory: Name of the module in memory.
        router_in_memory: Name of the router in memory; that on disk when None.
    """
    gate, up, down = names
    expert = f"{block}.experts.{{expert}}."
    places = dict.fromkeys((in_memory, block))  # transformers writes stacked ones under both
    stacked = [f"{place}.experts.gate_up_proj" for place in places]
    down_stacked = [f"{place}.experts.down_proj" for place in places]
    routers = (f"{block}.{router}.weight", f"{in_memory}.{router_in_memory or router}.weight")
    return (
        rule("moe/router/weight", *routers),
        rule("moe/experts/gate_up", f"{expert}{gate}.weight", *stacked, half=0),
        rule("moe/experts/gate_up", f"{expert}{up}.weight", *stacked, half=1),
        rule("moe/experts/down", f"{expert}{down}.weight", *down_stacked),
    )


PROJECTED_EXPERTS = experts("mlp", ("gate_proj", "up_proj", "down_proj"))


def linear_swiglu(path: str, block: str) -> tuple[Rule, ...]:
    """Return the rules of a SwiGLU with two tensors, as Granite has it.

    Args:
        path: Path from the block.
        block: Name of its module after that of the block.
    """
    return (
        rule(f"{path}/gate_up", f"{block}.input_linear.weight"),
        rule(f"{path}/down", f"{block}.output_linear.weight"),
    )


_LINEAR = "block_sparse_moe"
LINEAR_EXPERTS = (
    rule("moe/router/weight", f"{_LINEAR}.router.layer.weight", f"{_LINEAR}.router.weight"),
    *(
        rule(
            "moe/experts/gate_up",
            f"{_LINEAR}.input_linear.weight",
            f"{_LINEAR}.experts.gate_up_proj",
            half=half,
        )
        for half in (0, 1)
    ),
    rule("moe/experts/down", f"{_LINEAR}.output_linear.weight", f"{_LINEAR}.experts.down_proj"),
)
