# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A router that writes down whom it chose: for traces, in evaluation.

    extra["recorded"][context["index"]] = expert_ids + 1     [N K] i32, elsewhere 0

Every token's row is written by the device that has it and is 0 on all others, so that the record
adds up over devices like every other statistic, and comes out whole on any mesh, stacked over
layers. It costs N K numbers a layer on each device.

It is no member of RouterConfig: `recorded` puts it round the router of a model that is to be looked
at, and that is neither trained nor saved.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmoe.parameters import Declaration
from jaxmoe.routing.base import RouterInputs, RouterOutput, RouterStatistics
from pallas_kernels.jax_versions import match_varying

RECORDED = "recorded"


def recorded(moe: Any, num_tokens: int) -> Any:
    """A MoEConfig whose router is recorded.

    Args:
        moe: a `jaxmoe.models.config.MoEConfig`.
        num_tokens: B * S of the batches to come.

    Raises:
        ValueError: with its router tokens do not choose experts.
    """
    if not moe.router.traits.is_token_major:
        raise ValueError(
            f"moe.router={moe.router.name}: a routing trace is of tokens that choose experts, and"
            " with this router experts choose tokens, or mix them"
        )
    router = moe.router
    given = {field.name: getattr(router, field.name) for field in dataclasses.fields(router)}
    router = _recording_of(type(router))(**given, num_tokens=num_tokens)
    return dataclasses.replace(moe, router=router)


@functools.cache
def _recording_of(config: type) -> Any:
    """A config that is one of the given class, and builds the same router, recorded."""

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
    """The router."""

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
        """Those of the router that chooses."""
        return self.router.declarations()

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """As the router that chooses."""
        return self.router.init(key)

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """As the router that chooses, with the record."""
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
        """As the router that chooses."""
        return self.router.update(state, statistics, step)


def recorded_ids(statistics: RouterStatistics) -> Int[np.ndarray, "L N K"]:
    """The experts of every token of the batch, E (of the routed ones) where a slot is empty."""
    return np.asarray(statistics.extra[RECORDED]) - 1
