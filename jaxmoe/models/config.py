# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines `ModelConfig`: the sizes and the sequence of layers of a model, and nothing of devices.

A model is a sequence of layers, a layer is a mixer and a feed-forward. `attention`, `moe`,
`dense_layers` and `dense_dim` are the short form for the usual stack; `layers` is the general one.
The forward multipliers of a parameterisation belong to the model and are saved with it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import ClassVar

from jaxmoe import combinations
from jaxmoe.adapters.base import Adapter
from jaxmoe.configs import check_choices
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.carry import CarriedArray, carried_arrays
from jaxmoe.layers.context import ForwardMultipliers as ForwardMultipliers
from jaxmoe.layers.context import LayerContext, heads_of, require_positive
from jaxmoe.layers.feed_forwards import DenseConfig as DenseConfig
from jaxmoe.layers.feed_forwards import FeedForwardBase as FeedForwardBase
from jaxmoe.layers.feed_forwards import MoEConfig as MoEConfig
from jaxmoe.layers.mixers import AttentionConfig as AttentionConfig
from jaxmoe.layers.mixers import LatentAttentionConfig as LatentAttentionConfig
from jaxmoe.layers.mixers import MixerBase
from jaxmoe.layers.norms import NormBase, NormPlace, RmsNormConfig
from jaxmoe.layers.residual import Residual, StandardResidualConfig
from jaxmoe.layers.rotary import YarnConfig as YarnConfig
from jaxmoe.layers.rows import NestedRows, RowTransform, rows_of
from jaxmoe.models.loop import LayerLoop
from jaxmoe.models.predictor import Predictor
from jaxmoe.models.stacks import Layer, LayerStack, Scan, group_layers
from jaxmoe.routing.composition import RoutingWarning, causal_advice


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One layer of `ModelConfig.layers`."""

    name: ClassVar[str] = "layer"

    mixer: MixerBase | None = None
    """Mixer of the layer; `model.attention` when None."""
    feed_forward: FeedForwardBase | None = None
    """Feed-forward of the layer; when None, `model.moe`, or a dense one in `model.dense_layers`."""

    def __post_init__(self):
        check_choices("layer", self)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """What published models add to a transformer; the defaults add nothing."""

    name: ClassVar[str] = "options"

    norm_place: NormPlace = "before"
    """Norms of each half of a layer: before it, after it on what it adds to the residual stream
    (OLMo 2), or both (sandwich)."""
    logits_softcap: float | None = None
    """Bound c of the output logits z, which become c tanh(z / c), after their multiplier; None: no
    bound."""

    has_head_bias: bool = False
    """Whether the output logits have a bias for each token of the vocabulary."""
    predictor: Predictor | None = None
    """Modules after the last layer that predict tokens further ahead; None: there are none."""

    def __post_init__(self):
        check_choices("model.options", self)
        if self.logits_softcap is not None and not 0 < self.logits_softcap < math.inf:
            raise ValueError(
                f"model.options.logits_softcap={self.logits_softcap} must be a number above 0, or"
                " None for no bound"
            )


_NO_OPTIONS = ModelOptions()


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int = 256
    """Vocabulary size (V); token ids are in [0, V)."""
    num_layers: int = 4
    """Number of layers (L)."""
    embed_dim: int = 128
    """Width of the residual stream (D)."""
    attention: MixerBase = AttentionConfig()
    """Mixer of every layer for which `layers` names no other."""
    moe: MoEConfig | None = MoEConfig()
    """Feed-forward of every layer that is not dense; all layers are dense when None."""
    dense_layers: tuple[int, ...] = ()
    """Layers (from 0) with a dense feed-forward instead of experts."""
    dense_dim: int = 512
    """Hidden units of a dense feed-forward layer."""
    layers: tuple[LayerConfig, ...] = ()
    """Layers that differ: all of them, or a period that is repeated up to num_layers. Empty: every
    layer has the mixer `attention` and the feed-forward `moe`."""
    norm_epsilon: float = 1e-6
    """Term added to the mean square or the variance in norms."""
    norm: NormBase = RmsNormConfig()
    """Norm of the halves of layers, and after the last layer."""
    residual: Residual = StandardResidualConfig()
    """How layers read the residual stream and write to it."""
    loop: LayerLoop | None = None
    """Layers that are called several times with the same parameters; None: each once."""
    has_tied_embeddings: bool = False
    """Whether the output head is the transposed embedding."""
    multipliers: ForwardMultipliers | None = None
    """Constant factors in the forward pass, which a parameterisation fills in; None: all are 1."""
    adapter: Adapter | None = None
    """What is trained of a model whose other parameters are those of `checkpoint.initial`; None
    trains all of them."""
    options: ModelOptions | None = None
    """What some published models add; nothing when None."""

    def __post_init__(self):
        check_choices("model", self)
        fields = ("vocab_size", "num_layers", "embed_dim", "dense_dim", "norm_epsilon")
        require_positive("model", self, *fields)
        wrong = [layer for layer in self.dense_layers if not 0 <= layer < self.num_layers]
        if wrong:
            raise ValueError(
                f"model.dense_layers={wrong}: layers are numbered 0 to {self.num_layers - 1}"
            )
        if tuple(sorted(set(self.dense_layers))) != self.dense_layers:
            raise ValueError(f"model.dense_layers={self.dense_layers} must ascend without repeats")
        self._check_layers()
        if self.loop is not None:
            self.loop.check(self.num_layers)
        if self.extras.predictor is not None:
            self.extras.predictor.check(self)
        combinations.check(model=self)
        if self.moe and self.attention.is_causal:
            for text in causal_advice(self.moe):
                warnings.warn(text, RoutingWarning, stacklevel=3)

    def _check_layers(self) -> None:
        """Refuse layers that cannot stand in one model."""
        if len(self.layers) > self.num_layers:
            raise ValueError(
                f"model.layers names {len(self.layers)} layers, which must be at most"
                f" model.num_layers={self.num_layers}: raise num_layers, or shorten the period"
            )
        for index, layer in enumerate(self.layers):
            path = f"model.layers.{index}"
            mixer = layer.mixer
            fed = layer.feed_forward
            if mixer is not None and mixer.is_causal != self.attention.is_causal:
                raise ValueError(
                    f"{path}.mixer.is_causal={mixer.is_causal} and"
                    f" model.attention.is_causal={self.attention.is_causal} must be equal"
                )
            scale = self.forward_multipliers.attention_scale
            width = (mixer or self.attention).head_dim
            default_dim = self.attention.head_dim
            attends = not (mixer or self.attention).is_recurrent
            if attends and scale is not None and width != default_dim:
                raise ValueError(
                    f"{path}.mixer has heads of {width} and model.attention of {default_dim}, and"
                    f" model.multipliers.attention_scale={scale} is for one width: make them"
                    " equal, or take a parameterisation that leaves the scale out (standard)"
                )
            if fed is not None and fed.is_routed and fed != self.moe:
                raise ValueError(
                    f"{path}.feed_forward must equal model.moe, whose statistics and balancers all"
                    " MoE layers share: leave it out"
                )
            numbers = [i for i in self.dense_layers if i % len(self.layers) == index]
            if fed is not None and numbers:
                raise ValueError(
                    f"model.dense_layers={numbers} and {path}.feed_forward both name the"
                    f" feed-forward"
                    " of these layers: leave one of them out"
                )

        for mixer in self.mixers:
            mixer.check_layers(self.mixers, self._periods)

    def _periods(self) -> list[list[MixerBase]]:
        """Return the mixers of each period of layers that is repeated."""
        return [[stack.kind.mixer for stack in scan.stacks] for scan in self.scans]

    @property
    def extras(self) -> ModelOptions:
        """The options, neutral ones where there are none."""
        return self.options or _NO_OPTIONS

    @property
    def forward_multipliers(self) -> ForwardMultipliers:
        """Constant factors in the forward pass."""
        return self.multipliers or ForwardMultipliers()

    @property
    def context(self) -> LayerContext:
        """Numbers that layers read."""
        return _context(self)

    def carries(self, execution: ExecutionConfig) -> dict[str, CarriedArray]:
        """Return the arrays that flow from layer to layer beside the residual stream, by name.

        Args:
            execution: How the layers are computed, on the current mesh.
        """
        return carried_arrays(self.context, execution)

    @property
    def mixers(self) -> tuple[MixerBase, ...]:
        """Distinct mixers, in the order of the layers."""
        mixers = [layer.mixer or self.attention for layer in self.layers]
        return tuple(dict.fromkeys(mixers or [self.attention]))

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """Mixer and feed-forward of every layer, in order."""
        dense = DenseConfig(hidden_dim=self.dense_dim)
        layer_kinds = []
        for index in range(self.num_layers):
            layer = self.layers[index % len(self.layers)] if self.layers else LayerConfig()
            default = dense if self.moe is None or index in self.dense_layers else self.moe
            layer_kinds.append(Layer(layer.mixer or self.attention, layer.feed_forward or default))
        return tuple(layer_kinds)

    def mixer_path(self, layer: int) -> str:
        """Return the dotted path of the mixer of a layer.

        Args:
            layer: Number of the layer.
        """
        index = layer % len(self.layers) if self.layers else 0
        if self.layers and self.layers[index].mixer is not None:
            return f"model.layers.{index}.mixer"
        return "model.attention"

    @property
    def scans(self) -> tuple[Scan, ...]:
        """Consecutive layers that are computed in one loop; see `jaxmoe.models.stacks`."""
        return _scans(self)

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Equal layers whose parameters are stacked under one path, in the order of the paths."""
        return tuple(stack for scan in self.scans for stack in scan.stacks)

    @property
    def further_scan(self) -> Scan | None:
        """Layers of the modules after the last layer; None without such modules."""
        predictor = self.extras.predictor
        return None if predictor is None else predictor.scan(self.kinds, self.num_moe_layers)

    @property
    def module_stacks(self) -> tuple[LayerStack, ...]:
        """Stacks of the modules after the last layer."""
        return () if self.further_scan is None else self.further_scan.stacks

    @property
    def num_router_states(self) -> int:
        """Number of routers with a state, those of modules after the last layer included."""
        return self.num_moe_layers + sum(len(stack.moe_layers) for stack in self.module_stacks)

    @property
    def layer_numbers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Pairs (path of a stack, numbers of its layers)."""
        return tuple((stack.path, tuple(stack.layers)) for stack in self.stacks)

    @property
    def rows_per_sequence(self) -> int:
        """Rows that the layers compute for each sequence."""
        return max(mixer.rows_per_sequence for mixer in self.mixers)

    def rows(self, execution: ExecutionConfig, last: RowTransform | None = None) -> NestedRows:
        """Return what rearranges the rows around all layers: the mixer, the residual, halves.

        Args:
            execution: How the layers are computed.
            last: Further arrangement of a caller, which takes what these return; or None.
        """
        transforms = (self.kinds[0].mixer, self.residual, rows_of(execution), last)
        return NestedRows(tuple(rows for rows in transforms if rows is not None))

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(kind.feed_forward.is_routed for kind in self.kinds)


# A search over meshes asks for these of one model many thousand times.
@functools.lru_cache(maxsize=64)
def _context(model: ModelConfig) -> LayerContext:
    kinds = model.kinds
    return LayerContext(
        embed_dim=model.embed_dim,
        norm_epsilon=model.norm_epsilon,
        norm=model.norm,
        norm_place=model.extras.norm_place,
        multipliers=model.forward_multipliers,
        mixers=tuple(dict.fromkeys(kind.mixer for kind in kinds)),
        feed_forwards=tuple(dict.fromkeys(kind.feed_forward for kind in kinds)),
        heads=tuple(dict.fromkeys(heads for kind in kinds if (heads := heads_of(kind.mixer)))),
        recurrent=tuple(
            dict.fromkeys(kind.mixer.name for kind in kinds if kind.mixer.is_recurrent)
        ),
        keeps_order=any(kind.feed_forward.keeps_order or kind.mixer.is_recurrent for kind in kinds),
        residual=model.residual,
        view=model.adapter,
    )


@functools.lru_cache(maxsize=64)
def _scans(model: ModelConfig) -> tuple[Scan, ...]:
    loop = model.loop
    has_cycles = bool(model.layers)
    if loop is None:
        return group_layers(model.kinds, has_cycles=has_cycles)
    looped = loop.layers(model.num_layers)
    return group_layers(model.kinds, has_cycles=has_cycles, looped=looped, turns=loop.times)
