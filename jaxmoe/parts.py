# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer for models that are not built by this library.

    moe = MoE(num_experts=8, top_k=2)                          Flax Linen
    variables = moe.init(key, x)                               plain arrays
    y, aux = moe.apply(variables, x)                           x [B S D]
    loss = task_loss(y) + aux.loss

`jaxmoe.nnx.MoE` is the same layer for Flax NNX. The steps of the layer are functions of arrays:

    assignments, aux = route(config, params["router"], x)      experts and gates of each token
    rows, order = dispatch(x, assignments, E)                  one row an assignment, by expert
    outputs = experts(params["experts"], rows, order.group_sizes)
    y = combine(outputs, assignments, order)                   sums of gate * output

Both compute with `jaxmoe.layers.feed_forwards.moe`, as `jaxmoe.Transformer` does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct, traverse_util
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.catalog import choice
from jaxmoe.declarations import Declaration, Declared, draw
from jaxmoe.execution import ExecutionConfig
from jaxmoe.kernel_choices import KernelsConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.feed_forwards.moe.computation import assign
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig, token_route
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.layers.observer import BriefObserver
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import Extent, GateBase, RouterBase, RouterInputs, RouterStatistics
from jaxmoe.routing.balancers.base import Balancer, statistics_losses
from jaxmoe.routing.capacity import CapacityConfig
from jaxmoe.routing.telemetry import dropped_fraction, load
from pallas_kernels.backend import Implementation
from sharding import assignments as slots
from sharding import axes as ax
from sharding.assignments import Assignments
from sharding.constrain import in_own_mesh, place_like, surroundings, without_mesh
from sharding.expert_parallel import Dispatcher
from sharding.expert_parallel.permute import (
    Permutation,
    permute_rows,
    repeat_tokens,
    sort_by_expert,
)

STATE = "router_state"
"""Collection of the state of a router, which only some have: the biases of `loss_free`."""
STREAM = "router"
"""Name of the PRNG stream of routers that draw random numbers in training."""

_SHAPES_ONLY = ExecutionConfig(
    precision=PrecisionPolicy(compute="float32"), kernels=KernelsConfig(grouped_swiglu="reference")
)


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class MoEAux:
    """What a MoE layer reports beside its output, of all tokens of the call."""

    loss: Float[Array, ""]
    """Sum of the weighted losses, to add to the loss of the model."""
    losses: dict[str, Float[Array, ""]]
    """Weighted losses by the name of the balancer: `load_balance`, `router_z`."""
    load: Float[Array, " E"]
    """Share of the assignments that each expert receives; their sum is 1, and 1/E is even."""
    dropped: Float[Array, ""]
    """Share of the assignments that a capacity or a dispatcher dropped."""


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer of SwiGLU experts.

    Parameters are plain arrays: `router/weight [D E]` (of most routers), `experts/gate_up
    [E D 2 F]`, `experts/down [E F D]`, and `shared/...` where there are shared experts. A router
    with a state keeps it in the collection `router_state` and updates it in a call with
    `train=True` and `mutable=["router_state"]`, as batch statistics are. Random numbers of a router
    come from the stream `router`.

    The layer runs without a mesh, and under a mesh of any axis names, Auto or Explicit, where the
    compiler lays it out. On a mesh of `sharding.make_mesh` a `dispatcher` spreads the experts over
    the axis `expert`; `route` and `sharding.expert_parallel` do so over other axes. Inside of a
    `jax.shard_map` it routes, and reports on, the tokens of one device.

    Attributes:
        num_experts: E, routed experts.
        top_k: K, routed experts of a token.
        expert_dim: F, hidden units of an expert; 4 D when None.
        num_shared_experts: Experts applied to every token beside the routed ones.
        router: Name in `jaxmoe.routing.ROUTERS`, or a config.
        gate: Name in `jaxmoe.routing.GATES`, or a config; one that fits the router when None.
        balancers: Names in `jaxmoe.routing.BALANCERS`, or configs; those of `MoEConfig` that fit
            the router when None.
        capacity_factor: Capacity of an expert over the even load; nothing is dropped when None.
        dispatcher: Name of a dispatcher (`all_to_all`, `all_gather`, ...), or a config.
        dtype: Dtype of the products and of the result, float32 or bfloat16; that of x when None.
        param_dtype: Dtype of the parameters.
        config: Everything of the attributes up to `capacity_factor`, in their place.
    """

    num_experts: int = 8
    top_k: int = 2
    expert_dim: int | None = None
    num_shared_experts: int = 0
    router: str | RouterBase = "softmax_topk"
    gate: str | GateBase | None = None
    balancers: tuple[str | Balancer, ...] | None = None
    capacity_factor: float | None = None
    dispatcher: str | Dispatcher = "local"
    dtype: Any = None
    param_dtype: Any = "float32"
    config: MoEConfig | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*B D"],
        *,
        token_mask: Bool[Array, "*B"] | None = None,
        tokens: Int[Array, "*B"] | None = None,
        train: bool = False,
    ) -> tuple[Float[Array, "*B D"], MoEAux]:
        """Route, compute and combine.

        Args:
            x: Normed activations [B S D], [S D], or with more leading dimensions.
            token_mask: False for padding, which gets the output 0 of routed experts and enters no
                loss.
            tokens: Vocabulary ids, for the router `hash`.
            train: Whether the router behaves as in training.

        Returns:
            The output in the dtype of the products, and what routing reports.

        Raises:
            ValueError: Choices that do not fit one another, the width, the dtype or the mesh.
        """
        width = x.shape[-1]
        moe = self._moe(width)
        execution = self._execution(x)
        params = self._parameters(moe, width)
        router = moe.build_router(width)
        state = self._router_state(router)
        key = self.make_rng(STREAM) if train and moe.router.traits.needs_key else None
        arrays = {"token_mask": token_mask, "tokens": tokens, "key": key}

        def compute(params: Any, x: Array, arrays: Any, state: Any) -> tuple[Array, Any]:
            _check_alone(moe, execution, x)
            rows = x.reshape(-1, *x.shape[-2:])
            routing = _routing_inputs(rows.shape[:2], arrays["token_mask"], arrays["tokens"])
            routing = dataclasses.replace(routing, key=arrays["key"], router_state=state)
            layer: Any = moe.build(LayerContext(embed_dim=width), execution, train=train)
            y, outputs = layer.apply({"params": params}, rows, routing)
            y = place_like(y.reshape(x.shape), x)
            return y, (outputs.statistics, outputs.losses)

        run = in_own_mesh(compute, x)
        router_state = {} if state is None else state.value["state"]
        y, (statistics, losses) = run(params, x, arrays, router_state)
        if state is not None and train and not self.is_initializing():
            if self.is_mutable_collection(STATE):
                step = state.value["step"]
                still = jax.lax.stop_gradient(statistics)
                update = router.update(state.value["state"], still, step)
                state.value = {"state": update, "step": step + 1}
        return y, _aux(moe, statistics, losses)

    def _moe(self, width: int) -> MoEConfig:
        """Return the config of the layer."""
        if self.config is not None:
            names = {field.name for field in dataclasses.fields(MoEConfig)} | {"capacity_factor"}
            for field in dataclasses.fields(MoE):
                if field.name in names and getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"MoE({field.name}=..., config=MoEConfig(...)) says {field.name} twice:"
                        " write it in the config alone"
                    )
            return self.config
        router = _member("router", self.router)
        traits = router.traits
        defaults = MoEConfig()
        gate = "softmax" if traits.has_own_gates else defaults.gate
        balancers: tuple[str | Balancer, ...] = defaults.balancers if traits.is_learned else ()
        if traits.has_own_load or traits.evens_load:
            balancers = tuple(part for part in defaults.balancers if not part.traits.evens_load)
        balancers = balancers if self.balancers is None else self.balancers
        factor = self.capacity_factor
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_dim=4 * width if self.expert_dim is None else self.expert_dim,
            num_shared_experts=self.num_shared_experts,
            router=router,
            gate=_member("gate", gate if self.gate is None else self.gate),
            balancers=tuple(_member("balancer", balancer) for balancer in balancers),
            capacity=None if factor is None else CapacityConfig(factor=factor),
        )

    def _execution(self, x: Array) -> ExecutionConfig:
        """Return how the layer is computed."""
        compute: Any = jnp.dtype(x.dtype if self.dtype is None else self.dtype).name
        if compute not in ("float32", "bfloat16"):
            raise ValueError(
                f"MoE computes in float32 or bfloat16, and {'x' if self.dtype is None else 'dtype'}"
                f" is {compute}: set dtype='bfloat16' or 'float32'"
            )
        dispatcher = _member("dispatcher", self.dispatcher)
        return ExecutionConfig(dispatcher=dispatcher, precision=PrecisionPolicy(compute=compute))

    def _parameters(self, moe: MoEConfig, width: int) -> dict[str, dict[str, Array]]:
        """Return the parameters of each part, as plain arrays."""

        def initialise(key: Array, declarations: Mapping[str, Declaration]) -> dict[str, Array]:
            values = draw(declarations, key)
            return {
                name: value.astype(declarations[name].dtype or self.param_dtype)
                for name, value in values.items()
            }

        return {
            part: self.param(part, initialise, declarations)
            for part, declarations in _declarations(moe, width).items()
        }

    def _router_state(self, router: Any) -> nn.Variable | None:
        """Return the variable of the router's state and its steps; None where it has none."""
        if not jax.tree.leaves(jax.eval_shape(lambda: router.init(jax.random.key(0))[1])):
            return None

        def initial() -> dict[str, Any]:
            state = router.init(jax.random.key(0))[1]
            return {"state": state, "step": jnp.zeros((), jnp.int32)}

        return self.variable(STATE, "routing", initial)


def route(
    config: MoEConfig,
    params: Mapping[str, Array],
    x: Float[Array, "T D"],
    *,
    token_mask: Bool[Array, " T"] | None = None,
    state: Any = None,
    sequence_length: int | None = None,
    batch_axes: tuple[str, ...] = (),
    train: bool = False,
    key: Array | None = None,
) -> tuple[Assignments, MoEAux]:
    """Choose the experts of each token, and their gates.

    Args:
        config: Router, gate, balancers and capacity; `MoEConfig(num_experts=8, top_k=2)`.
        params: Parameters of the router: `weight [D E]` for those that score by one matrix.
        x: Normed tokens.
        token_mask: False for padding.
        state: State of a router that has one; fresh when None.
        sequence_length: Tokens of a sequence, for routers and capacities that look at one; all
            tokens are one sequence when None.
        batch_axes: Mesh axes of the `jax.shard_map` around the call over which tokens are spread:
            losses and load are those of all of them.
        train: Whether the router behaves as in training.
        key: PRNG key, for routers that draw random numbers in training.

    Returns:
        Token, expert and gate of each assignment, token t's in the slots t K to t K + K - 1; and
        the losses and the load.

    Raises:
        ValueError: A router of mixtures, or experts without computation, of which there are no
            assignments to rows.
    """
    width = x.shape[-1]
    if config.router.traits.mixes_tokens or config.zero_computation is not None:
        raise ValueError(
            f"parts.route has no rows for mixtures of tokens (router {config.router.name}) and for"
            " zero_computation: use the module jaxmoe.MoE(config=...)"
        )
    router = config.build_router(width)
    mask = jnp.ones(x.shape[:1], bool) if token_mask is None else token_mask
    length = x.shape[0] if sequence_length is None else sequence_length
    extent = Extent(sequence_length=length, batch_axes=batch_axes)
    first = jax.lax.axis_index(batch_axes) * x.shape[0] if batch_axes else 0
    index = jnp.arange(x.shape[0], dtype=jnp.int32) + jnp.asarray(first, jnp.int32)
    inputs = RouterInputs(
        x=x.astype(jnp.float32),
        token_mask=mask,
        segment_ids=mask.astype(jnp.int32),
        context={"index": index},
        extent=extent,
    )
    state = router.init(jax.random.key(0))[1] if state is None else state
    output = router.route(dict(params), state, inputs, train=train, key=key)
    assignments, statistics = assign(output, inputs, config, BriefObserver(), train=train, key=key)
    if batch_axes:
        statistics = jax.tree.map(lambda leaf: jax.lax.psum(leaf, batch_axes), statistics)
    return assignments, _aux(config, statistics, {})


def dispatch(
    x: Float[Array, "T D"], assignments: Assignments, num_experts: int
) -> tuple[Float[Array, "A D"], Permutation]:
    """Return one row for each assignment, sorted by expert.

    Args:
        x: Tokens.
        assignments: Token and expert of each assignment, from `route`.
        num_experts: E.

    Returns:
        The rows, those of empty slots last, and their order: `order.group_sizes [E]` rows belong to
        each expert.
    """
    order = sort_by_expert(assignments.expert_ids, num_experts)
    if assignments.top_k is None:
        rows = x[assignments.token_ids]
    else:
        rows = repeat_tokens(x, assignments.top_k)
    return permute_rows(rows, order.order, order.inverse), order


def experts(
    weights: Mapping[str, Array],
    rows: Float[Array, "A D"],
    group_sizes: Int[Array, " E"],
    gates: Float[Array, " A"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "A D"]:
    """Apply to each row the SwiGLU of its expert: `down (silu(x gate) * (x up))`.

    Args:
        weights: `gate_up [E D 2 F]` and `down [E F D]`; they are cast to the dtype of the rows.
        rows: Rows sorted by expert, from `dispatch`.
        group_sizes: Rows of each expert; rows past their sum give 0.
        gates: Factor of each row's output, f32; None for 1, where `combine` has the gates.
        implementation: `reference`, `xla`, `pallas_tpu` or `pallas_gpu`; the measured one when
            None.
    """
    return apply_experts(weights, rows, group_sizes, gates, implementation=implementation)


def combine(
    outputs: Float[Array, "A D"],
    assignments: Assignments,
    order: Permutation,
    num_tokens: int | None = None,
) -> Float[Array, "T D"]:
    """Return the sum of each token's experts, weighted by the gates, in f32.

    Args:
        outputs: Outputs of the experts, sorted as `dispatch` sorted their rows.
        assignments: Tokens and gates.
        order: Order of the rows, from `dispatch`.
        num_tokens: T; needed where experts choose tokens, as with the router `expert_choice`.

    Returns:
        The sums in the dtype of the outputs.

    Raises:
        ValueError: The number of tokens does not follow from the assignments and is not given.
    """
    if num_tokens is None:
        if assignments.top_k is None:
            raise ValueError(
                "parts.combine: experts choose tokens here, so that the assignments do not say how"
                " many there are: write num_tokens=x.shape[0]"
            )
        num_tokens = assignments.expert_ids.shape[0] // assignments.top_k
    rows = permute_rows(outputs, order.inverse, order.order)
    return slots.combine(rows, assignments, num_tokens)


def _member(kind: str, value: Any) -> Any:
    """Return the config of a member of a choice, from its name or as it is."""
    return choice(kind, value)() if isinstance(value, str) else value


@functools.lru_cache(maxsize=64)
def _declarations(moe: MoEConfig, width: int) -> dict[str, dict[str, Declaration]]:
    """Return the parameters of each part of a layer by name, traced once."""
    layer = moe.build(LayerContext(embed_dim=width), _SHAPES_ONLY, train=False)
    rows = jax.ShapeDtypeStruct((1, 1, width), jnp.float32)
    with without_mesh():
        state = jax.eval_shape(lambda: moe.build_router(width).init(jax.random.key(0))[1])
        routing = jax.eval_shape(lambda: _routing_inputs((1, 1), None, jnp.zeros((1, 1), "int32")))
        routing = dataclasses.replace(routing, router_state=state)
        key = jax.eval_shape(lambda: jax.random.key(0))
        boxes: Any = jax.eval_shape(layer.init, key, rows, routing)["params"]
    flat: dict[tuple[str, str], Any] = traverse_util.flatten_dict(
        boxes, is_leaf=lambda _, node: isinstance(node, Declared)
    )
    parts: dict[str, dict[str, Declaration]] = {}
    for (part, name), box in flat.items():
        parts.setdefault(part, {})[name] = box.declaration
    return parts


def _routing_inputs(
    shape: tuple[int, ...], token_mask: Array | None, tokens: Array | None
) -> RoutingInputs:
    """Return the inputs of a layer on its own.

    Args:
        shape: B and S.
        token_mask: False for padding; none when None.
        tokens: Vocabulary ids, or None.
    """
    mask = jnp.ones(shape, bool) if token_mask is None else token_mask.reshape(shape)
    context = {"index": jnp.arange(mask.size, dtype=jnp.int32).reshape(shape)}
    if tokens is not None:
        context["tokens"] = tokens.reshape(shape)
    return RoutingInputs(
        token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={}, context=context
    )


def _aux(
    moe: MoEConfig, statistics: RouterStatistics, weight_losses: Mapping[str, Array]
) -> MoEAux:
    """Return the report of a layer.

    Args:
        moe: Balancers.
        statistics: Statistics of all tokens.
        weight_losses: Losses of the balancers that read weights.
    """
    losses = statistics_losses(moe.balancers, statistics, num_free=moe.num_zero_computation)
    losses |= weight_losses
    still = jax.lax.stop_gradient(statistics)
    return MoEAux(
        loss=sum(losses.values(), start=jnp.zeros((), jnp.float32)),
        losses=losses,
        load=load(still),
        dropped=dropped_fraction(still),
    )


def _check_alone(moe: MoEConfig, execution: ExecutionConfig, x: Array) -> None:
    """Refuse what a layer on its own, or the current mesh, does not have.

    Raises:
        ValueError: Names the choice and the way out.
    """
    if x.ndim < 2:
        raise ValueError(f"MoE needs x [B S D] or [S D], not {x.shape}")
    if moe.router.traits.carries_logits:
        raise ValueError(
            f"the router {moe.router.name} reads the logits of the MoE layer before, which a layer"
            " on its own does not have: take another router, or jaxmoe.Transformer"
        )
    dispatcher = execution.dispatcher
    if token_route(dispatcher) is not None:
        raise ValueError(
            f"the dispatcher {dispatcher.name} moves tokens from layer to layer, and a layer on its"
            " own has none before it: take another dispatcher, or jaxmoe.Transformer"
        )
    mesh = jax.sharding.get_abstract_mesh()
    around = surroundings()
    if around == "auto" and mesh.size > 1 and dispatcher.traits.spreads_experts:
        raise ValueError(
            f"MoE(dispatcher={dispatcher.name!r}) spreads experts over the axis `expert` of a mesh"
            f" of sharding.make_mesh, and the current mesh has the axes {mesh.axis_names}: make"
            " that mesh with make_mesh(MeshConfig(data=..., expert=...)), or leave dispatcher out"
            " and let the compiler lay the layer out, or call jaxmoe.parts.route and"
            " sharding.expert_parallel.expert_parallel in your own jax.shard_map"
        )
    if around != "explicit":
        return
    if x.ndim != 3:
        raise ValueError(
            f"on a mesh of sharding.make_mesh MoE needs x [B S D], not {x.shape}: reshape x, so"
            " that B can be cut over the axes replica, data and expert"
        )
    for size, name in zip(x.shape, (ax.ACT_BATCH, ax.ACT_SEQ), strict=False):
        axes = execution.placement.mesh_axes(name)
        devices = math.prod(mesh.shape[axis] for axis in axes)
        if size % devices:
            raise ValueError(
                f"MoE: the dimension {size} of x {x.shape} must be divisible by the {devices}"
                f" devices of the mesh axes {', '.join(axes)}: choose a multiple of {devices}, or"
                " another mesh"
            )
