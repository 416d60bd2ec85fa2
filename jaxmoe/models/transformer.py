# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder-only transformer: embedding, layers, norm, head.

    Transformer(model, execution).apply({"params": params}, tokens) -> Output

    stream = embedding of the tokens;  stream = rows.enter(stream)
    for scan in model.scans:  stream = layers of the scan(stream)
    x = rows.leave(stream);  logits = head(norm(x))

The call runs without a mesh, inside a user's Auto mesh, and on a mesh of `sharding.make_mesh`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmoe import combinations
from jaxmoe.adapters.view import adapted_view
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.carry import initial_carry
from jaxmoe.layers.feed_forwards.moe.layout import check_dispatcher
from jaxmoe.layers.gather import WHOLE
from jaxmoe.layers.observer import Observations
from jaxmoe.layers.records import Stream, TokenInputs
from jaxmoe.layers.rows import RowTransform
from jaxmoe.layers.sequences import current_order, lay_back, lay_out, token_numbers
from jaxmoe.layers.view import VIEW, Rewrite, View
from jaxmoe.models.cache import Cache, axis_devices
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import Embedding, Head, output_logits
from jaxmoe.models.layer_scan import (
    cache_by_path,
    join_outputs,
    scan_inputs,
    scan_layers,
    with_cache,
)
from jaxmoe.models.loop import run_scans
from jaxmoe.models.stacks import Scan
from jaxmoe.models.token_checks import check_tokens
from jaxmoe.routing import RouterStatistics
from jaxmoe.routing.balancers import statistics_losses
from sharding import axes as ax
from sharding.constrain import Placement, surroundings
from sharding.mesh import MeshConfig
from sharding.products.tensor_parallel import look_up
from sharding.sequence_parallel import TokenOrder


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class Output:
    """Result of the transformer."""

    logits: Float[Array, "B S V"] | None
    """Logits in f32; None with has_logits=False."""
    losses: dict[str, Float[Array, ""]]
    """Losses of the balancers, weighted and summed over layers, to add to the cross-entropy; in
    training those of the adapter too."""
    statistics: RouterStatistics | None
    """Routing statistics of the global batch, stacked over MoE layers; None for a dense model."""
    hidden: Float[Array, "B S D"]
    """Hidden states after the final norm."""
    cache: Cache | None
    """Caches with the new entries, when they were given; see `jaxmoe.models.cache`."""
    observations: Observations | None = None
    """What the observer has seen, of every layer."""
    further: dict[str, Float[Array, ""]] = struct.field(default_factory=dict)
    """Terms of the loss of an objective beside the likelihood of the tokens, summed over tokens;
    part of the summed loss of a training pass."""


class Transformer(nn.Module):
    """A decoder-only language model with Mixture-of-Experts layers.

    Attributes:
        model: Config of the model.
        execution: How it is computed.
        rewrite: Function of the parameters of each layer, from the `View` of `forward`; or None.
        rows: Further arrangement of the rows around the layers and in them; or None.
    """

    model: ModelConfig
    execution: ExecutionConfig = ExecutionConfig()
    rewrite: Rewrite | None = None
    rows: RowTransform | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        positions: Int[Array, "B S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
        token_mask: Bool[Array, "B S"] | None = None,
        router_state: Any = None,
        cache: Cache | None = None,
        train: bool = False,
        key: Array | None = None,
        context: Mapping[str, Array] | None = None,
        has_logits: bool = True,
        logits_at: Int[Array, " B"] | None = None,
        order: TokenOrder | None = None,
    ) -> Output:
        """Compute the logits of the next token at every position.

        Args:
            tokens: Ids in [0, V); inside of jit they are not compared with V.
            positions: Position of each token in its document; arange when None.
            segment_ids: Document of each token, 0 for padding. Tokens see only their own document,
                whose tokens are in order; padding is neither routed nor counted.
            token_mask: False for padding after a row's tokens, with a cache; it is not routed.
            router_state: State of the routers, stacked over MoE layers; fresh when None.
            cache: Caches of earlier tokens, from `initial_cache`; needs `positions`.
            train: Whether routers behave as in training.
            key: PRNG key for routers with noise.
            context: Further arrays [B S] for routers, see `TokenInputs.context` (`mask_ratio`,
                `index`).
            has_logits: False leaves the logits out, for a loss that applies the head itself.
            logits_at: Index in each row whose logits are computed, alone [B 1 V]; all when None.
            order: Order in which the [B S] arrays are laid out already by
                `jaxmoe.layers.sequences`, as the results then are; None for that of the tokens.
        """
        model = self.model
        execution = self.execution
        shared = model.context
        is_laid_out = order is not None
        _check_whole_call(model, tokens, execution)
        arrays = _token_arrays(tokens, positions, segment_ids, token_mask, context)
        if order is None and cache is None:
            order = current_order(shared, execution, tokens.shape[1], segment_ids)
            arrays = lay_out(arrays, order, execution)
        inputs = token_inputs(arrays, order, execution.placement)
        table = Embedding(model, name="embedding")()
        router_state = initial_router_state(model) if router_state is None else router_state
        flow = first_stream(model, table, inputs.context["tokens"], execution)
        caches = None if cache is None else dict(cache)
        options = {"train": train, "is_gathered": WHOLE in self.variables, "rewrite": self.rewrite}
        execution = execution.declaring() if self.is_initializing() else execution
        rows = model.rows(execution, self.rows)
        flow, inputs = rows.enter(flow, inputs, shared, execution, has_cache=cache is not None)
        layers = {
            scan.name: scan_layers(
                scan, shared, execution, block=rows.layer(Block, scan.name), **options
            )
            for scan in model.scans
        }

        def call(scan: Scan, flow: Any, turn: int) -> tuple[Any, Any]:
            flow = with_cache(scan, flow, caches)
            of_layers = scan_inputs(model, scan, router_state, key, turn)
            flow, output = layers[scan.name](flow, of_layers, inputs)
            if caches is not None:
                caches.update(cache_by_path(scan, flow.cache))
            return flow, output

        flow, outputs = run_scans(model.scans, call, flow, model.loop, shared, execution)
        statistics, losses, observations = join_outputs(model.scans, outputs)
        x = rows.leave(flow, shared, execution).x
        x = x if is_laid_out else lay_back(x, order, execution)
        x = model.norm.build(model.embed_dim, model.norm_epsilon, name="final_norm")(x)
        if self.is_initializing() and (predictor := model.extras.predictor) is not None:
            predictor.declare(model, execution, first_stream(model, table, tokens, execution))
        read = read_at(x, logits_at, execution.placement)
        weight = Head(model, name="head")(table)
        return Output(
            logits=output_logits(read, weight, model, execution) if has_logits else None,
            losses=balance_losses(model, statistics) | jax.tree.map(jnp.sum, losses),
            statistics=statistics,
            hidden=x,
            cache=caches,
            observations=observations,
        )


def forward(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    tokens: Int[Array, "B S"],
    *,
    gathered: Any = None,
    view: View | None = None,
    rows: RowTransform | None = None,
    **options: Any,
) -> Output:
    """Return `Transformer(model, execution).apply({"params": params}, tokens, **options)`, typed.

    Args:
        model: Config of the model.
        execution: How it is computed.
        params: Parameters of the model.
        tokens: Ids in [0, V).
        gathered: Gathered parameters for the layers, see `jaxmoe.layers.gather`; or None.
        view: View of the parameters of the layers, see `jaxmoe.layers.view`; or None.
        rows: Further arrangement of the rows, see `jaxmoe.layers.rows`; or None.
        **options: Further arguments of `Transformer`.
    """
    adapter = model.adapter
    adapted_params = params
    if adapter is not None:
        key = options.get("key") if options.get("train") else None
        adapted_params = adapter.prepare(adapted_params, model.layer_numbers, key)
        if adapter.has_view:
            adapted_params, view = adapted_view(
                adapter, adapted_params, view, [scan.name for scan in model.scans]
            )
    variables = {"params": adapted_params} | ({} if gathered is None else {WHOLE: gathered})
    if view is not None:
        variables |= {VIEW: view.own}
    transformer = Transformer(model, execution, None if view is None else view.rewrite, rows)
    output = cast(Output, transformer.apply(variables, tokens, **options))
    if adapter is not None and options.get("train"):
        adapter_losses = adapter.losses(params, execution.placement)
        output = dataclasses.replace(output, losses=output.losses | adapter_losses)
    return output


def balance_losses(
    model: ModelConfig, statistics: RouterStatistics | None
) -> dict[str, Float[Array, ""]]:
    """Return the weighted loss of each balancer that reads statistics; none for a dense model.

    Args:
        model: Config of the balancers.
        statistics: Routing statistics of the batch, stacked over MoE layers.
    """
    if model.moe is None or statistics is None:
        return {}
    moe = model.moe
    return statistics_losses(moe.balancers, statistics, num_free=moe.num_zero_computation)


def initial_router_state(model: ModelConfig) -> Any:
    """Return fresh state of all routers, stacked over MoE layers; empty where they have none."""
    if model.moe is None or not model.num_router_states:
        return {}
    router = model.moe.build_router(model.embed_dim)
    # Each layer has its own key, the same on every mesh, for states that start at random.
    keys = jax.random.split(jax.random.key(0), model.num_router_states)
    states = [router.init(key)[1] for key in keys]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _RowCuts(ExecutionConfig):
    """An execution with the sizes by which the current mesh cuts rows, for checks alone."""

    def __post_init__(self):
        """Check nothing: the fold belongs to the mesh of the config, and need not fit these."""

    @classmethod
    def of(cls, execution: ExecutionConfig, mesh: MeshConfig) -> _RowCuts:
        """Return an execution with other sizes of its mesh."""
        fields = dataclasses.fields(ExecutionConfig)
        values: dict[str, Any] = {field.name: getattr(execution, field.name) for field in fields}
        values["mesh"] = mesh
        return cls(**values)


def check_call(model: ModelConfig, tokens: Array, execution: ExecutionConfig) -> None:
    """Refuse tokens that are no rows of ids, and a current mesh that does not fit.

    Raises:
        ValueError: Tokens of another shape or dtype, choices that do not combine, a length that the
            mesh does not divide.
    """
    check_tokens(tokens, model.vocab_size)
    length = tokens.shape[1]
    placement = execution.placement
    mesh = jax.sharding.get_abstract_mesh()
    names = {name for axis in ax.LOGICAL_AXES for name in placement.mesh_axes(axis)}
    if missing := sorted(names - set(mesh.axis_names)):
        raise ValueError(
            f"the current mesh has the axes {', '.join(mesh.axis_names)}, and execution.fold="
            f"{execution.mesh_fold} needs {', '.join(missing)}: make it with"
            " make_mesh(execution.mesh, fold=execution.mesh_fold)"
        )
    seq = axis_devices(placement, ax.ACT_SEQ_INNER)
    tensor = max(execution.mesh.tensor, axis_devices(placement, ax.ACT_SEQ) // seq)
    sizes = dataclasses.replace(execution.mesh, seq=seq, tensor=tensor)
    combinations.check(model=model, execution=_RowCuts.of(execution, sizes))
    check_dispatcher(
        model.moe,
        execution,
        num_layers=model.num_moe_layers,
        vocab_size=model.vocab_size,
        sizes=mesh.shape,
    )
    shards = axis_devices(placement, ax.ACT_SEQ)
    if length % shards:
        raise ValueError(
            f"sequences of {length} tokens must be divisible by the {shards} devices that share"
            " their positions (mesh seq x tensor): choose another length, or set these axes to 1"
        )


def _check_whole_call(model: ModelConfig, tokens: Array, execution: ExecutionConfig) -> None:
    """Refuse what `check_call` refuses, and a mesh whose devices have some of the layers each."""
    check_call(model, tokens, execution)
    if surroundings() == "explicit":
        execution.check_one_stage("this computes all of them on every device")


def _token_arrays(
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    token_mask: Array | None,
    context: Mapping[str, Array] | None,
) -> dict[str, Any]:
    """Return the arrays [B S] that are not None, as `token_inputs` takes them."""
    arrays = {
        "tokens": tokens,
        "positions": positions,
        "segment_ids": segment_ids,
        "token_mask": token_mask,
        "context": dict(context or {}),
    }
    return {name: array for name, array in arrays.items() if array is not None}


def _token_mask(arrays: Mapping[str, Any]) -> Bool[Array, "B S"]:
    """Return which tokens are not padding."""
    segment_ids = arrays.get("segment_ids")
    if "token_mask" in arrays:
        return arrays["token_mask"]
    return jnp.ones_like(arrays["tokens"], dtype=bool) if segment_ids is None else segment_ids != 0


def read_at(x: Float[Array, "B S D"], index: Array | None, placement: Placement) -> Array:
    """Return the hidden states that the head reads: all, or one of each row.

    Args:
        x: Hidden states.
        index: Place in each row [B]; None: all.
        placement: Layout rules.
    """
    if index is None:
        return x
    x = placement.place(x, (None, None, None))
    x = jnp.take_along_axis(x, index[:, None, None], axis=1)
    return placement.place(x, (ax.ACT_BATCH, None, None))


def token_inputs(
    arrays: Mapping[str, Any],
    order: TokenOrder | None,
    placement: Placement,
) -> TokenInputs:
    """Return what every layer receives of the tokens, laid out as the residual stream.

    Args:
        arrays: Arrays [B S] in this order: `tokens`, those of `positions`, `segment_ids` and
            `token_mask` that are given, and further ones for routers in a dict `context`.
        order: Order of the tokens in a row; None is their own.
        placement: Layout rules.
    """
    rows = (ax.ACT_BATCH, ax.ACT_SEQ)
    arrays = jax.tree.map(lambda x: placement.place(x, rows + (None,) * (x.ndim - 2)), dict(arrays))
    number, length = arrays["tokens"].shape
    index = token_numbers(jnp.arange(number, dtype=jnp.int32), order, length)
    index = placement.place(index, (ax.ACT_BATCH, ax.ACT_SEQ))
    return TokenInputs(
        positions=arrays.get("positions"),
        segment_ids=arrays.get("segment_ids"),
        token_mask=_token_mask(arrays),
        order=None if order is None or order.by_row is None else order,
        context={"tokens": arrays["tokens"], "index": index, **arrays["context"]},
    )


def first_stream(
    model: ModelConfig,
    table: Float[Array, "V D"],
    ids: Int[Array, "B S"],
    execution: ExecutionConfig,
) -> Stream:
    """Return the embedded tokens as a stream, with what layers carry to the next one.

    Args:
        model: Model with the layers.
        table: Embedding of each token.
        ids: Tokens; the embedding is 0 for ids that a table split by vocabulary does not have.
        execution: How the model is computed.
    """
    dtype = execution.precision.compute_dtype
    x = look_up(table.astype(dtype), ids, execution.placement)
    x = x * jnp.asarray(model.forward_multipliers.embedding, dtype)
    return Stream(x=x, carry=initial_carry(model.carries(execution), ids.shape, execution))
