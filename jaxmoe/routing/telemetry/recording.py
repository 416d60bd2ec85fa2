# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records the chosen experts of every token in evaluation, for routing traces.

    extra["recorded"][context["index"]] = expert_ids + 1     [N K] i32, elsewhere 0

The row of a token is written by its device and 0 on all others, so the record is additive over
devices like every other statistic and complete on any mesh, stacked over layers. It costs N K
numbers per layer on each device.

`record_router` wraps the router of a model that is evaluated, not trained or saved; the wrapper is
not a router of the catalogue.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import Arrays, Key, RouterInputs, RouterOutput, RouterStatistics
from pallas_kernels.jax_versions import match_varying

RECORDED = "recorded"


def record_router(moe: Any, num_tokens: int) -> Any:
    """Return a MoEConfig whose router is recorded.

    Args:
        moe: MoE layer, a `jaxmoe.models.config.MoEConfig`.
        num_tokens: Tokens B * S of a batch.

    Raises:
        ValueError: tokens do not choose experts with this router.
    """
    if not moe.router.traits.is_token_major:
        raise ValueError(
            f"moe.router={moe.router.name}: a routing trace is of tokens that choose experts, and"
            " with this router experts choose tokens, or mix them"
        )
    router = moe.router
    fields = {field.name: getattr(router, field.name) for field in dataclasses.fields(router)}
    router = _recording_of(type(router))(**fields, num_tokens=num_tokens)
    return dataclasses.replace(moe, router=router)


@functools.cache
def _recording_of(config: type) -> Any:
    """Return a subclass of a router config that builds the recorded router."""

    def build(self: Any, *, num_experts: int, top_k: int, embed_dim: int) -> Recording:
        sizes = {"num_experts": num_experts, "top_k": top_k, "embed_dim": embed_dim}
        return Recording(config.build(self, **sizes), self.num_tokens)

    return dataclasses.make_dataclass(
        f"Recorded{config.__name__}",
        [("num_tokens", int)],
        bases=(config,),
        namespace={"build": build},
        frozen=True,
        kw_only=True,
        slots=True,
    )


@dataclasses.dataclass(frozen=True)
class Recording:
    """The wrapped router."""

    router: Any
    num_tokens: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        """K."""
        return self.router.top_k

    def declarations(self) -> dict[str, Declaration]:
        """Return the parameters of the wrapped router."""
        return self.router.declarations()

    def init(self, key: Array) -> tuple[Arrays, Any]:
        """Return parameters and state of the wrapped router."""
        return self.router.init(key)

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Route with the wrapped router, and add the record to its statistics."""
        output = self.router.route(params, state, inputs, train=train, key=key)
        top_k = self.router.top_k
        ids_TK = output.selection.expert_ids.reshape(-1, top_k)
        index = inputs.context["index"]
        empty = match_varying(jnp.zeros((self.num_tokens, top_k), jnp.int32), index, ids_TK)
        record = empty.at[index].set(ids_TK + 1)
        extra = {**output.statistics.extra, RECORDED: record}
        return dataclasses.replace(
            output, statistics=dataclasses.replace(output.statistics, extra=extra)
        )

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Update the wrapped router."""
        return self.router.update(state, statistics, step)


def recorded_ids(statistics: RouterStatistics) -> Int[np.ndarray, "L N K"]:
    """Return the experts of every token of the batch; E of the routed experts marks empty slots."""
    return np.asarray(statistics.extra[RECORDED]) - 1
