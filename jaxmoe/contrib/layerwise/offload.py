# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates with a window of layers on the device; the others stay in host memory.

    window = LayerWindow(4)
    for tokens in stream(model, host_params, prompt, ..., programs=window): ...
    print(window)                      # bytes moved, layers that were waited for, peak bytes

While a layer is computed, a thread copies the next ones, in the order in which a token passes
through them; the first layers follow the last. The tokens are those of `generate`. With w layers in
the window at most w + 1 are on the device: the window, and the layer before it while the device
still reads it.

Source: the memory window of TPI-LLM, arXiv 2410.00531, section 3.3.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.contrib.layerwise.chain import Chain, layer_calls, stack_parameters
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import Cache, initial_cache
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import (
    DecodeInputs,
    DecodeState,
    HostParametersConfig,
    HostPrograms,
    Programs,
    ProgramShape,
)
from jaxmoe.models.sampling import choose
from jaxmoe.models.stacks import LayerCall


class WindowStore:
    """Layers in host memory, of which a window is on the device; a `LayerStore`."""

    def __init__(self, model: ModelConfig, params: Any, size: int):
        """Begin with no layer on the device.

        Args:
            model: Layers.
            params: Parameters as host arrays.
            size: Layers of the window.
        """
        self._host: dict[tuple[str, int], Any] = {}
        for stack in model.stacks:
            stack_params = jax.tree.map(np.asarray, stack_parameters(params, stack))
            for place in range(stack.num_layers):
                layer_slice = slice(place, place + 1)
                self._host[stack.path, place] = jax.tree.map(
                    lambda x, layer_slice=layer_slice: x[layer_slice], stack_params
                )
        self._order = [(call.stack.path, call.place) for call in layer_calls(model)]
        self._size = size
        self._next = 0
        self._held: dict[tuple[str, int], concurrent.futures.Future[Any]] = {}
        self._last: tuple[str, int] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="layers")
        self.asked = self.waited = self.moved_bytes = self.peak_layers = self.peak_bytes = 0

    def layer(self, call: LayerCall) -> tuple[Any, int]:
        """Return the layer, and begin to copy those that follow it.

        Args:
            call: Layer; in the order of the model.
        """
        key = (call.stack.path, call.place)
        number = len(self._order)
        if self._order[self._next] != key:
            self._next = self._order.index(key)
        ahead = range(self._next, self._next + self._size)
        places = list(dict.fromkeys(self._order[place % number] for place in ahead))
        self._held = {
            layer_place: layer_params
            for layer_place, layer_params in self._held.items()
            if layer_place in places
        }
        for layer_place in places:
            if layer_place not in self._held:
                self._held[layer_place] = self._thread.submit(
                    jax.device_put, self._host[layer_place]
                )
                self.moved_bytes += tree_bytes(self._host[layer_place])
        present = {*self._held, *([self._last] if self._last else [])}
        self.peak_layers = max(self.peak_layers, len(present))
        self.peak_bytes = max(
            self.peak_bytes, sum(tree_bytes(self._host[layer_place]) for layer_place in present)
        )
        self.asked += 1
        self.waited += not self._held[key].done()
        self._next = (self._next + 1) % number
        self._last = key
        return self._held[key].result(), 0

    def close(self) -> None:
        """End the thread, and free the layers on the device."""
        self._thread.shutdown()
        self._held.clear()


class Offload(HostPrograms):
    """Makes the programs for a chain that `begin` returns."""

    @abc.abstractmethod
    def begin(
        self, model: ModelConfig, execution: ExecutionConfig, params: Any, router_state: Any
    ) -> Chain:
        """Return the chain of one generation.

        Args:
            model: Layers.
            execution: How they are computed.
            params: Parameters as host arrays.
            router_state: State of the routers as host arrays; fresh when None.
        """

    def __call__(self, shape: ProgramShape) -> Programs:
        """Return the programs of a generation."""
        model = shape.model
        execution = shape.execution
        pick = functools.partial(_pick, is_greedy=shape.is_greedy, has_filters=shape.has_filters)
        chain: Chain | None = None

        def read(inputs: DecodeInputs, tokens: np.ndarray, lengths: np.ndarray) -> DecodeState:
            nonlocal chain
            self.close()
            chain = self.begin(model, execution, inputs.params, inputs.router_state)
            batch, length = tokens.shape
            places = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
            masks = {"positions": places, "token_mask": places < lengths[:, None]}
            cache = initial_cache(model, execution, batch=batch, length=shape.capacity)
            logits, cache = _decode(chain, tokens, cache, lengths - 1, masks)
            token, is_done = pick(logits, inputs.keys[0], inputs.limits, inputs.ends)
            return DecodeState(token, jnp.asarray(lengths), is_done, cache)

        def write(
            inputs: DecodeInputs, state: DecodeState, first: np.int32, count: np.int32
        ) -> tuple[DecodeState, np.ndarray]:
            assert chain is not None  # the prompt is read first
            _, _, keys, limits, ends = inputs  # the chain has the parameters
            written = []
            for index in range(first, first + count):
                options = {"positions": state.length[:, None]}
                logits, cache = _decode(chain, state.token[:, None], state.cache, None, options)
                new, is_end = pick(logits, keys[index], limits, ends)
                if len(ends):
                    new = jnp.where(state.is_done, ends[0], new)
                    is_end = state.is_done | is_end
                state = DecodeState(new, state.length + 1, is_end, cache)
                written.append(new)
            return state, np.stack(jax.device_get(written), axis=1)

        return Programs(read, write)


class LayerWindow(Offload):
    """Generates with a window of layers."""

    def __init__(self, size: int):
        """Begin without a model.

        Args:
            size: Layers on the device.
        """
        self.size = size
        self.store: WindowStore | None = None

    def begin(
        self, model: ModelConfig, execution: ExecutionConfig, params: Any, router_state: Any
    ) -> Chain:
        """Return a chain whose layers are in a new window."""
        self.store = WindowStore(model, params, self.size)
        looped = {scan.name for scan in model.scans}
        outside = {name: x for name, x in params.items() if name not in looped}
        router_state = jax.device_put(router_state)
        return Chain.of(model, execution, jax.device_put(outside), router_state, self.store)

    def __str__(self) -> str:
        store = self.store
        if store is None:
            return f"window of {self.size} layers: nothing was generated"
        return (
            f"window of {self.size} layers: {store.moved_bytes / 1e6:.1f} MB moved, ready"
            f" {store.asked - store.waited} of {store.asked} times, at most {store.peak_layers}"
            f" layers with {store.peak_bytes / 1e6:.1f} MB on the device"
        )

    def close(self) -> None:
        """End the thread of the last generation."""
        if self.store is not None:
            self.store.close()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWindowConfig(HostParametersConfig):
    """A window of layers on the device, the others in host memory (TPI-LLM)."""

    name: ClassVar[str] = "window"

    size: int = 4
    """Layers on the device."""

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"layers=window:{self.size} must have at least one layer: window:4")

    @classmethod
    def parse(cls, text: str) -> LayerWindowConfig:
        """Return the config of window:N; see the base class."""
        name, _, size = text.partition(":")
        if name != cls.name or not size.isdecimal():
            raise ValueError(
                f"layers={text} must be window:N with the layers on the device: window:4"
            )
        return cls(size=int(size))

    def build(self) -> LayerWindow:
        """Return a window without a model."""
        return LayerWindow(self.size)


def _decode(
    chain: Chain, tokens: Any, cache: Cache, at: np.ndarray | None, options: dict[str, Any]
) -> tuple[Array, Cache]:
    """Return the logits of one token of each row [B V], and the caches."""
    stream, inputs = chain.begin(tokens, **options)
    caches = dict(cache)
    for call in chain.calls:
        before = stream.x
        stream = chain.call(
            call, dataclasses.replace(stream, cache=caches[call.stack.path]), inputs
        )
        caches[call.stack.path] = stream.cache
        stream = dataclasses.replace(stream, cache=None)
        jax.block_until_ready(before)  # the layer before is free now
    return chain.logits(stream, at)[:, -1], caches


@functools.partial(jax.jit, static_argnames=("is_greedy", "has_filters"))
def _pick(
    logits: Array, key: Array, limits: Any, ends: Array, *, is_greedy: bool, has_filters: bool
) -> tuple[Array, Array]:
    token = choose(logits, key, limits, is_greedy=is_greedy, has_filters=has_filters)
    return token, jnp.isin(token, ends)


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
