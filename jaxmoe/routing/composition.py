# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that the parts of a MoE layer's routing fit together, from the router's traits.

To add a rule: `jaxmoe/routing/composition.py`, with both fields and the way out in its message, and
a row in `tests/jaxmoe/routing/test_composition.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

from jaxmoe.routing.balancers import of_weights


class RoutingWarning(UserWarning):
    """A combination of routing parts that runs but has an effect that is easily overlooked."""


def check_parts(moe: Any) -> None:
    """Check that the parts of a MoE layer are compatible; warn about parts without effect.

    Args:
        moe: MoE layer, a `jaxmoe.models.config.MoEConfig`.

    Raises:
        ValueError: two parts contradict one another.
    """
    router = moe.router
    traits = moe.router.traits
    if traits.has_own_gates and moe.gate.name != "softmax":
        raise ValueError(
            f"moe.router={router.name} defines its own gates, and moe.gate={moe.gate.name} would"
            " replace them: set moe.gate to softmax, which takes the router's scores as they are"
        )
    if traits.has_own_load or traits.evens_load:
        against = [balancer.name for balancer in moe.balancers if balancer.traits.evens_load]
        if against:
            raise ValueError(
                f"moe.balancers={', '.join(against)}: the router {router.name} evens the load by"
                " itself, and the loss would pull against it: leave it out of moe.balancers"
            )
    if traits.has_own_load and moe.capacity is not None:
        raise ValueError(
            f"moe.capacity: the router {router.name} sets the load of each expert itself:"
            " leave moe.capacity out"
        )
    if moe.zero_computation is not None and not traits.is_token_major:
        raise ValueError(
            f"moe.zero_computation: with the router {router.name} tokens do not choose experts, and"
            " could not choose those without computation: leave moe.zero_computation out"
        )
    if moe.zero_computation is not None and moe.gate.scales_input:
        raise ValueError(
            "moe.gate.scales_input is true, and the gates of experts without computation multiply"
            " their outputs: set moe.gate.scales_input to false, or leave moe.zero_computation out"
        )
    if moe.zero_computation is not None and moe.capacity is not None:
        if not moe.capacity.traits.has_zero_computation:
            raise ValueError(
                f"moe.capacity={moe.capacity.name} is about rows of experts that compute, and"
                " moe.zero_computation has experts without: leave one of them out"
            )
    needing = [balancer.name for balancer in moe.balancers if balancer.traits.needs_smooth_load]
    if needing and not traits.has_smooth_load:
        raise ValueError(
            f"moe.balancers={', '.join(needing)} needs the smooth loads of the router noisy_topk,"
            f" and moe.router={router.name} has none: use importance_variation or load_balance"
        )
    _check_weights(moe)
    for text in advice(moe):
        warnings.warn(text, RoutingWarning, stacklevel=4)


def advice(moe: Any) -> list[str]:
    """Return a line for each part without effect, with the reason and the way out.

    Args:
        moe: MoE layer, a `jaxmoe.models.config.MoEConfig`.
    """
    router = moe.router
    traits = moe.router.traits
    lines = []
    has_task_gradient = traits.has_own_gates or traits.has_own_load or not traits.is_learned
    name = "top_k" if traits.final_top_k is None else "router.final_top_k"
    if (traits.final_top_k or moe.top_k) == 1 and not has_task_gradient:
        is_after = getattr(router, "softmax", "before") == "after"
        if is_after or moe.gate.name in ("renormalized", "sqrt"):
            field = "moe.router.softmax=after" if is_after else f"moe.gate={moe.gate.name}"
            lines.append(
                f"moe.{name}=1 with {field}: the only gate of a token is always 1, so the language"
                " model's loss gives the router no gradient; use softmax before the choice with"
                " moe.gate softmax"
            )
    if not traits.is_learned and moe.balancers:
        names = ", ".join(balancer.name for balancer in moe.balancers)
        lines.append(
            f"moe.balancers={names}: the router {router.name} has nothing to learn, and a loss"
            " of its choices changes nothing but the number: leave moe.balancers empty"
        )
    return lines + _capacity_advice(moe, is_causal=False)


def causal_advice(moe: Any) -> list[str]:
    """Return a line for each part by which later tokens affect earlier ones, evaluation included.

    Args:
        moe: MoE layer of a causal model, a `jaxmoe.models.config.MoEConfig`.
    """
    return _capacity_advice(moe, is_causal=True)


def _capacity_advice(moe: Any, *, is_causal: bool) -> list[str]:
    if moe.capacity is None:
        return []
    return moe.capacity.advice(
        top_k=moe.top_k,
        num_experts=moe.num_experts,
        num_free=moe.num_zero_computation,
        is_causal=is_causal,
    )


def _check_weights(moe: Any) -> None:
    """Check that the router has the matrices that balancers of weights need."""
    balancers = of_weights(moe.balancers)
    if not balancers:
        return
    sizes = {"num_experts": moe.num_routed, "embed_dim": 1}
    declared = moe.router.build(top_k=moe.top_k, **sizes).declarations()
    for balancer in balancers:
        for name in balancer.router_parameters:
            if name not in declared or declared[name].shape != (1, moe.num_routed):
                raise ValueError(
                    f"moe.balancers={balancer.name} compares the rows of the router's matrix"
                    f" `{name}`, a column for each expert, and moe.router={moe.router.name} has"
                    f" none: leave {balancer.name} out, or take a router that scores by one matrix"
                    " (softmax_topk)"
                )
