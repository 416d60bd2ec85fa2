# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the model-wide numbers that layers read; `ModelConfig.context` builds them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from flax import linen as nn

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.carry import Carry
from jaxmoe.layers.norms import NormBase, NormPlace, RmsNormConfig
from jaxmoe.layers.residual import Residual, StandardResidualConfig
from jaxmoe.layers.rows import RowTransform
from jaxmoe.layers.view import ParameterView
from jaxmoe.precision import PrecisionPolicy
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardMultipliers:
    """Constant factors in the forward pass, filled in by a parameterisation."""

    embedding: float = 1.0
    """Factor of the embedded tokens."""
    residual: float = 1.0
    """Factor of each mixer and feed-forward output before it is added to the residual stream."""
    logits: float = 1.0
    """Factor of the output logits."""
    router: float = 1.0
    """Factor of the router logits."""
    attention_scale: float | None = None
    """Factor of the attention logits; 1 / sqrt(head_dim) when None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionHeads:
    """Head counts and mask of a mixer that attends, read by sequence parallelism and FLOPs."""

    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """M, key and value heads."""
    head_dim: int
    """H, width of one query or key."""
    value_dim: int
    """Hv, width of one value."""
    is_causal: bool
    """Whether a token sees no later one."""
    window: int | None = None
    """Positions that a query sees, itself included; all when None."""
    chunk: int | None = None
    """Positions of a chunk, whose queries see no other chunk; None: rows are not cut."""

    def positions_seen(self, length: int) -> float:
        """Return the mean number of positions that a query of a sequence sees.

        Args:
            length: S, positions of the sequence.
        """
        row = length if self.chunk is None else min(length, self.chunk)
        seen = row / 2 if self.is_causal else row
        if self.window is None:
            return seen
        # Without causality a window reaches as far ahead as it does back.
        return min(seen, self.window if self.is_causal else 2 * self.window - 1)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of the logits and the weighted sum per token, forward and backward.

        Args:
            length: S, positions of the sequence.
        """
        features = self.num_heads * (self.head_dim + self.value_dim)
        return 6.0 * features * self.positions_seen(length)

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer; a row of sums per head is kept in f32.

        Args:
            shards: Function from a logical axis to the devices that split it.
            itemsize: Bytes per value in the compute dtype.
        """
        number = self.num_heads / shards(ax.ACT_HEADS)
        keys = 2 * self.num_kv_heads / shards(ax.ACT_KV_HEADS)
        output = number * self.head_dim * itemsize
        projected = (number + keys) * self.head_dim * itemsize
        return MixerActivations(
            projected=projected,
            output=output,
            kept=2 * projected + output + 4 * number,
            working=_HEAD_ARRAYS * output,
            named=output + 4 * number,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixerActivations:
    """Bytes per token of the arrays of one mixer in a train step, on one device."""

    projected: float
    """Results of the products with the residual stream, which remat "dots" keeps."""
    output: float
    """Input of the product that leads back to the stream."""
    kept: float
    """Everything that the backward pass reads, which remat "none" keeps."""
    working: float
    """Arrays that exist at one time in the backward pass of the layer."""
    named: float = 0.0
    """Results of its kernel, which remat "kernels" keeps."""


_HEAD_ARRAYS = 10
"""Arrays [B S N H] that exist at one time in the backward pass of attention."""


class MixerBase(Carry, RowTransform, abc.ABC):
    """Base class of the configs of mixers."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    module: ClassVar[type[nn.Module]]
    """Class of the module of one layer: of the config, the context, the execution, and a name."""
    module_name: ClassVar[str]
    """Name of the module among the parameters of a layer."""
    operation: ClassVar[str | None]
    """Operation of `pallas_kernels` that computes it; None if none does."""
    width_fields: ClassVar[tuple[str, ...]]
    """Fields that grow with the width of a model."""
    axis_fields: ClassVar[Mapping[str, str]]
    """Fields that the mesh divides, by logical axis."""
    layer_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that published models change from layer to layer: what a layer sees, or its number."""
    is_recurrent: ClassVar[bool]
    """Whether it carries a state from token to token."""
    can_quantize: ClassVar[bool]
    """Whether its matrices may be stored in few bits."""
    has_pages: ClassVar[bool] = False
    """Whether its cache can be kept in pages."""
    can_select_pages: ClassVar[bool] = False
    """Whether a generated token may read a part of the pages."""
    num_heads: int
    """N, query heads, or heads of the state."""
    head_dim: int
    """H, width of one query, or of one head of the state."""
    is_causal: bool
    """Whether a token sees no later one."""

    def check_layers(
        self, mixers: Sequence[MixerBase], periods: Callable[[], Sequence[Sequence[MixerBase]]]
    ) -> None:
        """Refuse layers beside which the mixer cannot stand in one model.

        Args:
            mixers: Distinct mixers of the model.
            periods: Returns the mixers of each period of layers that is repeated, in order.

        Raises:
            ValueError: Names `model.layers`, and the way out.
        """

    @property
    @abc.abstractmethod
    def key_features(self) -> int:
        """Features of the keys of one token."""

    @abc.abstractmethod
    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer, gates left out.

        Args:
            embed_dim: D.
        """

    @abc.abstractmethod
    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token beyond the parameters', forward and backward.

        Args:
            length: Positions of a sequence.
        """

    @abc.abstractmethod
    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer.

        Args:
            shards: Function from a logical axis to the devices that split it.
            itemsize: Bytes per value in the compute dtype.
        """

    def check_precision(self, precision: PrecisionPolicy) -> None:
        """Refuse a precision that the layers do not implement: few bits where they cannot be.

        Args:
            precision: Precision of the execution.

        Raises:
            ValueError: Names the field: quantised weights, or products in 8 bits.
        """
        if self.can_quantize:
            return
        settings = {"weights": (precision.weights, "floating")}
        settings["matmul"] = (precision.matmul.name, "full")
        for field, (value, only) in settings.items():
            if value != only:
                raise ValueError(
                    f"execution.precision.{field}={value} is not for {self.name} layers, whose"
                    f" products are in the compute dtype: set it to {only}"
                )

    @abc.abstractmethod
    def cache_bytes_per_token(self, precision: PrecisionPolicy, *, layers: int) -> int:
        """Return the bytes that a cache holds of one token of one sequence.

        Args:
            precision: Format of the cache.
            layers: Layers with this mixer.
        """

    @abc.abstractmethod
    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> Any:
        """Return an empty cache, cut as the mesh is.

        Args:
            execution: Precision and placement of the cache.
            layers: Layers that the cache is stacked over.
            batch: Sequences.
            slots: Positions that it can hold.
        """

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool = False,
        name: str | None = None,
    ) -> nn.Module:
        """Return the module of one layer.

        Args:
            context: Model-wide numbers.
            execution: How it is computed.
            train: Whether the layer behaves as in training; most compute the same.
            name: Name among the parameters.
        """
        del train
        return self.module(self, context, execution, name=name)


class AttentionMixer(MixerBase):
    """Base class of the configs of mixers that attend: heads of queries, keys and values.

    A mixer that makes them in another way says what it has in place of their matrices.
    """

    __slots__ = ()

    width_fields: ClassVar[tuple[str, ...]] = ("num_heads", "num_kv_heads")
    axis_fields: ClassVar[Mapping[str, str]] = {
        ax.HEADS: "num_heads",
        ax.KV_HEADS: "num_kv_heads",
    }

    module_name: ClassVar[str] = "attention"
    operation: ClassVar[str | None] = "flash_attention"
    is_recurrent: ClassVar[bool] = False
    can_quantize: ClassVar[bool] = True
    num_kv_heads: int
    """M, key and value heads."""

    @property
    def value_dim(self) -> int:
        """Width of one head's values."""
        return self.head_dim

    @property
    @abc.abstractmethod
    def window(self) -> int | None:
        """Tokens before a token, itself included, that it sees; None for all."""

    @property
    @abc.abstractmethod
    def chunk(self) -> int | None:
        """Positions of a chunk, whose tokens see no other chunk; None where rows are not cut."""

    @property
    def heads(self) -> AttentionHeads:
        """Head counts and mask."""
        names = (field.name for field in dataclasses.fields(AttentionHeads))
        return AttentionHeads(**{name: getattr(self, name) for name in names})

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer.

        Gates and vectors (norms, biases, sinks) are left out.
        """
        heads = self.num_heads + self.num_kv_heads  # of q and k, and of o and v
        return embed_dim * heads * (self.head_dim + self.value_dim)

    @property
    def key_features(self) -> int:
        """Features of the keys of one token."""
        return self.heads.num_kv_heads * self.heads.head_dim

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token beyond the parameters', forward and backward."""
        return self.heads.flops_per_token(length)


class RecurrentMixer(MixerBase):
    """Base class of the configs of mixers that carry a state from token to token."""

    __slots__ = ()

    operation: ClassVar[str | None] = None
    width_fields: ClassVar[tuple[str, ...]] = ("num_heads",)
    axis_fields: ClassVar[Mapping[str, str]] = {ax.HEADS: "num_heads"}
    is_recurrent: ClassVar[bool] = True
    key_features: ClassVar[int] = 0
    is_causal: ClassVar[bool] = True
    can_quantize: ClassVar[bool] = False

    @property
    def module_name(self) -> str:
        """Name of the module among the parameters of a layer."""
        return self.name

    def cache_bytes_per_token(self, precision: PrecisionPolicy, *, layers: int) -> int:
        """Return 0: the state of a sequence does not grow with its tokens."""
        del precision, layers
        return 0


class FeedForwardBase(Carry, abc.ABC):
    """Base class of the configs of feed-forwards."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    module_name: ClassVar[str]
    """Name of the module among the parameters of a layer."""
    width_fields: ClassVar[tuple[str, ...]]
    """Fields that grow with the width of a model."""
    is_routed: ClassVar[bool]
    """Whether a router chooses experts for each token."""
    keeps_order: bool
    """Whether rows must be in the order of their tokens."""

    @property
    @abc.abstractmethod
    def sizes(self) -> FeedForwardSizes:
        """Sizes that plans read."""

    @abc.abstractmethod
    def check_execution(
        self, execution: ExecutionConfig, *, sequences: int, length: int, mesh: Mapping[str, int]
    ) -> None:
        """Refuse an execution that cannot compute the layer.

        Args:
            execution: How it is computed.
            sequences: Sequences of a device in one pass.
            length: Tokens of a sequence.
            mesh: {axis or piece of one: size}.

        Raises:
            ValueError: Names the field.
        """

    @abc.abstractmethod
    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool,
        name: str | None = None,
    ) -> nn.Module | None:
        """Return the module of one layer; None where it has no feed-forward.

        Args:
            context: Model-wide numbers.
            execution: How it is computed.
            train: Whether the layer behaves as in training.
            name: Name among the parameters.
        """


class UnroutedFeedForward(FeedForwardBase):
    """Base class of the configs of feed-forwards without routed experts, for every execution."""

    __slots__ = ()

    is_routed: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False

    def check_execution(
        self, execution: ExecutionConfig, *, sequences: int, length: int, mesh: Mapping[str, int]
    ) -> None:
        """Accept every execution."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSizes:
    """Sizes of a feed-forward, read by plans of memory and traffic."""

    dense_dim: int = 0
    """Hidden units of a dense layer; 0 if tokens are routed."""
    read_dim: int = 0
    """Numbers that a token looks up in tables."""
    shared_dim: int = 0
    """Hidden units that every token meets beside the routed experts."""
    num_experts: int = 0
    """E; 0 in a dense layer."""
    top_k: int = 0
    """K, routed experts per token."""
    expert_dim: int = 0
    """F, hidden units of one expert."""
    num_projections: int = 2
    """Projections that the activation reads for each hidden unit: a gate and an up projection, or
    1."""
    row_slots: int = 0
    """Slots of assignments beyond K per token, for each sequence on a device."""
    batch_slots: int = 0
    """Slots of assignments beyond K per token, for the sequences of a device together."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerContext:
    """Numbers of a model that its layers share."""

    embed_dim: int
    """D, width of the residual stream."""
    norm_epsilon: float = 1e-6
    """Term added to the mean square or the variance in norms."""
    norm: NormBase = RmsNormConfig()
    """Norm of the halves of a layer."""
    norm_place: NormPlace = "before"
    """Where the halves have it."""
    multipliers: ForwardMultipliers = ForwardMultipliers()
    """Forward multipliers of the parameterisation."""
    mixers: tuple[MixerBase, ...] = ()
    """Distinct mixers, in the order of the layers."""
    feed_forwards: tuple[FeedForwardBase, ...] = ()
    """Distinct feed-forwards, in the order of the layers."""
    heads: tuple[AttentionHeads, ...] = ()
    """Distinct head counts of the mixers that attend, in the order of the layers."""
    recurrent: tuple[str, ...] = ()
    """Names of the mixers that carry a state through a sequence, in its order."""
    keeps_order: bool = False
    """Whether a mixer or a feed-forward needs rows in the order of their tokens."""
    residual: Residual = StandardResidualConfig()
    """How halves of layers read the residual stream and write to it."""
    view: ParameterView | None = None
    """The model's own view of its parameters: its adapter."""


def heads_of(mixer: Any) -> AttentionHeads | None:
    """Return the head counts and mask of a mixer that attends; None for a recurrent one."""
    return None if mixer.is_recurrent else mixer.heads


def require_positive(section: str, config: object, *fields: str) -> None:
    """Refuse a field that is not above 0.

    Args:
        section: Prefix of the field names in the message.
        config: The config that is validated.
        *fields: Names of its numeric fields.

    Raises:
        ValueError: A field is 0 or negative.
    """
    for field in fields:
        if not getattr(config, field) > 0:
            raise ValueError(f"{section}.{field}={getattr(config, field)} must be above 0")
