# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates with some routed experts in slots of the device; all of them are in host memory.

    slots = ExpertSlots(16, LRUConfig())
    for tokens in stream(model, host_params, prompt, ..., programs=slots): ...
    print(slots)                       # bytes moved, hits, bytes on the device

A slot holds one expert of any layer. After a layer has routed, a policy of `serving_lab.caches`
decides which experts leave; missing ones are copied into their slots. Where a slot is taken whose
expert is still to be computed, those in the slots are computed first, so that any number of slots
gives the tokens of `generate`. Hits and loads are those of `replay` for the same uses.

Source: expert caching as in HybriMoE, arXiv 2504.05897; other parameters stay on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.contrib.layerwise import moe_programs
from jaxmoe.contrib.layerwise.chain import Chain, layer_calls, stack_parameters
from jaxmoe.contrib.layerwise.offload import Offload, tree_bytes
from jaxmoe.contrib.serving_lab.caches import (
    ITEM_CACHES,
    BoundedCache,
    ItemCacheConfig,
    LRUConfig,
    Use,
    layer_uses,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from jaxmoe.layers.records import Stream, TokenInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import HostParametersConfig
from jaxmoe.models.stacks import LayerCall

_EXPERTS = "experts"


class SlotStore:
    """Experts in host memory, of which some are in slots of the device; an `ExpertStore`."""

    def __init__(
        self,
        model: ModelConfig,
        execution: ExecutionConfig,
        params: Any,
        size: int,
        policy: ItemCacheConfig,
    ):
        """Allocate empty slots.

        Args:
            model: Layers.
            execution: Dtype of the experts on the device.
            params: Parameters as host arrays.
            size: Slots.
            policy: Which experts leave.
        """
        dtype = execution.precision.compute_dtype
        self._host: dict[tuple[int, int], Any] = {}
        for stack in model.stacks:
            if not stack.kind.feed_forward.is_routed:
                continue
            experts = stack_parameters(params, stack)[stack.kind.feed_forward.module_name][_EXPERTS]
            experts = jax.tree.map(lambda x: np.asarray(x, dtype), experts)
            for place, layer in enumerate(stack.moe_layers):
                for expert in range(jax.tree.leaves(experts)[0].shape[1]):
                    at = place, expert
                    self._host[layer, expert] = jax.tree.map(lambda x, at=at: x[at], experts)
        stack_experts = next(iter(self._host.values()))
        self.num_slots = min(size, len(self._host))
        self._slots = jax.tree.map(
            lambda x: jnp.zeros((self.num_slots, *x.shape), x.dtype), stack_experts
        )
        self.expert_bytes, self.slot_bytes = tree_bytes(stack_experts), tree_bytes(self._slots)
        layers = [call.moe_layer for call in layer_calls(model) if call.stack.moe_layers]
        following = [Use(item=(layer, 0), category=str(layer)) for layer in layers * 2]
        self._next = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._cache = BoundedCache(
            policy.build(following),
            self.num_slots,
            dict.fromkeys(self._host, 1.0),
            on_load=self._load,
            on_drop=self._drop,
        )
        self._free, self._places = list(range(self.num_slots)), dict[Any, int]()
        self._before: dict[int, tuple] = {}
        self._pass: _LayerPass | None = None
        self.uses = self.hits = 0

    @property
    def loads(self) -> int:
        """Experts that were copied to the device."""
        return self._cache.loads

    def feed(self, chain: Chain, call: LayerCall, stream: Stream, about: TokenInputs) -> Stream:
        """Return the stream after the feed-forward half of a MoE layer.

        Args:
            chain: Model whose experts these are.
            call: MoE layer.
            stream: Stream after its mixer.
            about: Inputs of all layers.
        """
        moe: Any = call.stack.kind.feed_forward
        layer = call.moe_layer
        ids, rows = moe_programs.route(chain, call, stream, about)
        pass_ = self._pass = _LayerPass(chain.execution, ids, rows, moe)
        expected = self._before.get(self._next[layer], ())
        uses = layer_uses(layer, ids, moe.num_experts, expected=expected)
        for use in uses:
            self.hits += self._cache.use(use)
            pass_.waiting[use.item] = self._places[use.item]
        self.uses += len(uses)
        self._before[layer] = tuple(use.item for use in uses)
        pass_.compute(self._slots)
        self._pass = None
        return moe_programs.write(chain, call, stream, about, pass_.outputs)

    def _load(self, item: Any) -> None:
        """Copy an expert into a free slot."""
        slot = self._places[item] = self._free.pop()
        self._slots = _put(self._slots, np.int32(slot), self._host[item])

    def _drop(self, item: Any) -> None:
        """Free the slot of an expert, which is computed before if it waits."""
        if self._pass is not None and item in self._pass.waiting:
            self._pass.compute(self._slots)
        self._free.append(self._places.pop(item))


class _LayerPass:
    """Experts of one layer that are in slots and wait to be computed."""

    def __init__(self, execution: ExecutionConfig, ids: np.ndarray, rows: Any, moe: MoEConfig):
        self.outputs: Any = moe_programs.no_outputs(ids, rows)
        self.waiting: dict[Any, int] = {}
        self._given = execution, ids, rows
        self._moe = moe

    def compute(self, slots: Any) -> None:
        """Compute the experts that wait."""
        execution, ids, rows = self._given
        number = jax.tree.leaves(slots)[0].shape[0]
        places = np.full(self._moe.num_routed + 1, number, np.int32)
        for (_, expert), slot in self.waiting.items():
            places[expert] = slot
        self.outputs = moe_programs.compute(
            execution, self._moe.activation, slots, places, ids, rows, self.outputs
        )
        self.waiting.clear()


class ExpertSlots(Offload):
    """Generates with some experts on the device."""

    def __init__(self, size: int, policy: ItemCacheConfig | None = None):
        """Begin without a model.

        Args:
            size: Slots of the device, each for one expert.
            policy: Which experts leave; the least recently used when None.
        """
        self.size = size
        self.policy = policy or LRUConfig()
        self.store: SlotStore | None = None
        self._other_bytes = 0

    def begin(
        self, model: ModelConfig, execution: ExecutionConfig, params: Any, router_state: Any
    ) -> Chain:
        """Return a chain whose experts are in new slots."""
        if not model.num_moe_layers:
            raise ValueError(
                f"experts=slots:{self.size}: the model has no routed experts: leave it out"
            )
        layers: Any = [stack.kind.feed_forward for stack in model.stacks if stack.moe_layers]
        if any(layer.gate.scales_input for layer in layers):
            raise ValueError(
                f"experts=slots:{self.size}: moe.gate.scales_input is true, and an expert in a slot"
                " is computed before the gates of its tokens are known: leave it out"
            )
        if any(layer.extras.routed_input != "layer" for layer in layers):
            raise ValueError(
                f"experts=slots:{self.size}: moe.options.routed_input is shortcut, and an expert in"
                " a slot reads the input of its layer: leave it out"
            )
        if model.adapter is not None:
            raise ValueError(
                f"experts=slots:{self.size}: the model has an adapter, whose parameters are not in"
                " the slots: convert the run first (jaxmoe checkpoint convert --fold True)"
            )
        self.store = SlotStore(model, execution, params, self.size, self.policy)
        outside = jax.device_put(_without_experts(params, model))
        self._other_bytes = tree_bytes(outside)
        return Chain.of(model, execution, outside, jax.device_put(router_state), experts=self.store)

    def __str__(self) -> str:
        store = self.store
        if store is None:
            return f"{self.size} expert slots: nothing was generated"
        return (
            f"{store.num_slots} expert slots, {self.policy.name}:"
            f" {store.loads * store.expert_bytes / 1e6:.3g} MB moved in {store.loads} loads, hits"
            f" {store.hits} of {store.uses} uses, {store.slot_bytes / 1e6:.3g} MB of experts and"
            f" {self._other_bytes / 1e6:.3g} MB of other parameters on the device"
        )

    def close(self) -> None:
        """Do nothing: there is no thread."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSlotsConfig(HostParametersConfig):
    """Slots on the device, each for one routed expert; all experts in host memory."""

    name: ClassVar[str] = "slots"

    size: int = 16
    """Slots on the device."""
    policy: ItemCacheConfig = LRUConfig()
    """Which expert leaves when another one needs its slot."""

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"experts=slots:{self.size} must have at least one slot: slots:16")
        if not self.policy.is_live:
            raise ValueError(
                f"experts=slots:{self.size}:{self.policy.name} needs the uses to come, or does not"
                f" store every expert: choose {_live_policies()}"
            )

    @classmethod
    def parse(cls, text: str) -> ExpertSlotsConfig:
        """Return the config of slots:N or slots:N:policy; see the base class."""
        name, _, count = text.partition(":")
        size, _, policy = count.partition(":")
        if name != cls.name or not size.isdecimal() or (policy or "lru") not in ITEM_CACHES:
            raise ValueError(
                f"experts={text} must be slots:N with the experts on the device, or slots:N:policy"
                f" with one of {_live_policies()}: slots:16"
            )
        return cls(size=int(size), policy=ITEM_CACHES[policy or "lru"]())

    def build(self) -> ExpertSlots:
        """Return slots without a model."""
        return ExpertSlots(self.size, self.policy)


def _live_policies() -> str:
    """Return the names of the policies that decide without the uses to come."""
    return ", ".join(name for name, config in ITEM_CACHES.items() if config.is_live)


def _without_experts(params: Any, model: ModelConfig) -> Any:
    """Return the parameters without the weights of routed experts."""
    names = {
        f"{stack.path}/{stack.kind.feed_forward.module_name}/{_EXPERTS}/"
        for stack in model.stacks
        if stack.kind.feed_forward.is_routed
    }

    def kept(tree: Any, path: str) -> Any:
        return {
            name: kept(value, f"{path}{name}/") if isinstance(value, dict) else value
            for name, value in tree.items()
            if f"{path}{name}/" not in names
        }

    return kept(params, "")


@functools.partial(jax.jit, donate_argnums=0)
def _put(slots: Any, slot: Any, expert: Any) -> Any:
    """Return the slots with an expert in one of them."""
    return jax.tree.map(lambda all_, leaf: all_.at[slot].set(leaf), slots, expert)
