# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines `ExecutionConfig`: on which devices and with which kernels a model is computed.

It does not change the loss beyond rounding, except `precision.matmul`, which may round products to
8 bits and must stay the same when a run is resumed. `ModelConfig` says what is computed and names
no device, so a checkpoint restores on any mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from jaxmoe import combinations
from jaxmoe.configs import check_choices
from jaxmoe.field_docs import with_field_docs
from jaxmoe.kernel_choices import KernelsConfig as KernelsConfig
from jaxmoe.precision import PrecisionPolicy
from pallas_kernels.backend import platform
from sharding.constrain import Placement
from sharding.expert_parallel import Dispatcher, LocalConfig, ResidentConfig
from sharding.fold import MoEMesh, Refinement, refine
from sharding.mesh import MeshConfig, named_sizes
from sharding.pipeline import InterleavedConfig, PipelineOrder
from sharding.products.collective import WHOLE_PRODUCTS, TensorProductsConfig
from sharding.products.encoded import EncodedProduct
from sharding.rules import LogicalAxisRules
from sharding.sequence_parallel import (
    WHOLE_CACHE,
    CacheReading,
    NoSequenceParallelConfig,
    SequenceParallelism,
)
from sharding.state_layouts import STATE_LAYOUTS, StateLayout, StateLayoutName

MOST_UNROLLED = 4
"""Layers in one iteration of a loop on a GPU."""

_ONE_GROUP_A_STAGE = InterleavedConfig()

Remat = Literal["none", "dots", "kernels", "attention", "full", "offload"]


def keeps_attention(remat: Remat) -> bool:
    """Return whether the backward pass finds the results of attention.

    Args:
        remat: Rematerialisation of a layer.
    """
    return remat not in ("full", "offload")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """State of the optimiser, and parameters, that wait outside of device memory."""

    optimizer: Literal["host", "files"] = "host"
    """Memory of the optimiser state between two updates. files: memory-mapped files of one process,
    of which three parts are in host memory at once."""
    parts: int = 1
    """Parts in which that state is updated, for each stack of layers: two or three are on the
    device at once. 1 fetches the whole state, or that of a stack from files."""
    parameters: Literal["device", "host"] = "device"
    """Memory of the parameters of layers and of their gradients. host: the device holds two layers
    at a time, and needs remat full or offload."""
    directory: str = ""
    """Directory of the files of optimizer files, of one run alone; they take the size of the state
    twice. Empty: optimizer in the run directory."""

    def __post_init__(self):
        if self.parts < 1:
            raise ValueError(f"execution.offload.parts={self.parts} must be at least 1")


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionConfig:
    """Mesh, layout rules, dispatcher, kernels, precision and rematerialisation."""

    mesh: MeshConfig = MeshConfig(data=-1)
    """Sizes of the mesh axes; the training commands make this mesh and set it."""
    fold: MoEMesh | None = None
    """Another layout of the same devices for the experts; mesh.expert is then 1."""
    rules: StateLayoutName = "fully_sharded"
    """Layout of parameters, gradients and optimiser state; see sharding/state_layouts.py."""
    dispatcher: Dispatcher = LocalConfig()
    """Dispatcher that brings rows to their experts."""
    sequence_parallel: SequenceParallelism = NoSequenceParallelConfig()
    """Form of attention over sequences whose positions are sharded."""
    tensor_products: TensorProductsConfig = WHOLE_PRODUCTS
    """Form of the products beside which mesh.tensor gathers and scatters activations."""
    pipeline: PipelineOrder | None = None
    """Order of the micro-batches on the stages of mesh.stage; None for interleaved, one group of
    layers a stage (1F1B)."""
    kernels: KernelsConfig | None = None
    """Implementations of single kernels; None takes the measured one of each."""
    precision: PrecisionPolicy = PrecisionPolicy()
    """Dtypes of parameters, products and caches."""
    remat: Remat = "none"
    """Values that the backward pass recomputes, from less to more: none; all but matrix products
    and what the kernels of attention and experts keep; all but the latter; all but what attention
    keeps; each whole block; or each whole block, from an input kept in host memory."""
    remat_dense: Remat | None = None
    """The same for layers without routed experts; when None, as `remat`."""
    offload: OffloadConfig | None = None
    """State that waits outside of device memory; None for none."""
    halves: Literal[1, 2] = 1
    """Parts of a device's sequences that pass through a layer alternately, from 1024 tokens a
    device on: with 2 the collectives of one can run beside the products of the other, where the
    compiler makes them asynchronous (for v5e:2x4 with four tensor shards 6 of 62, without 4;
    libtpu 0.0.42 makes no more with xla_enable_async_all_reduce and the options
    xla_tpu_enable_async_collective_fusion_fuse_all_gather and _fuse_all_reduce)."""
    unroll: int | None = None
    """Layers in one iteration of the loop over equal layers; more compile longer and run faster,
    since the loop copies what it carries and keeps. None: 1, or on a GPU up to four, where it
    halved the temporaries, unless all of a layer is computed again. Stages of a pipeline do not
    unroll. On a CPU, whose compiler orders an unrolled loop without regard to memory, `remat` costs
    time there and saves nothing."""
    telemetry: Literal["brief", "detailed"] = "brief"
    """Extent of the measurements: the load of the routers; or also those of
    jaxmoe/contrib/telemetry, which runs experts twice."""
    loss_chunk: int = 0
    """Positions whose logits are computed at a time in the loss, rounded up to a multiple of the
    devices that share a sequence; 0 for all at once."""

    def __post_init__(self):
        check_choices("execution", self)
        combinations.check(execution=self)
        if self.mesh_fold is not None and -1 not in self.mesh.sizes:
            refine(self.mesh.by_axis, self.mesh_fold)
        if self.unroll is not None and self.unroll < 1:
            raise ValueError(f"execution.unroll={self.unroll} must be at least 1")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk={self.loss_chunk} must be 0 (whole) or positive")

    def check_one_stage(self, reason: str) -> None:
        """Refuse stages, where whole models are computed.

        Args:
            reason: What is computed so, a clause.

        Raises:
            ValueError: The mesh has several stages.
        """
        if self.mesh.stage > 1:
            raise ValueError(
                f"execution.mesh.stage={self.mesh.stage} splits the layers, and {reason}: set it to"
                " 1, and give the devices to another axis"
            )

    def unroll_of(self, length: int, on: str | None = None) -> int:
        """Return the layers in one iteration of a loop.

        Args:
            length: Layers of the loop.
            on: Platform; that of the devices of the mesh in context when None.
        """
        if self.unroll is not None:
            return min(self.unroll, length)
        if (on or platform()) != "gpu" or self.remat in ("full", "offload"):
            return 1  # nothing but the stream is stacked by the loop
        # The most that divide the layers, so that no rest is compiled beside.
        return max(number for number in range(1, MOST_UNROLLED + 1) if length % number == 0)

    def remat_of(self, is_routed: bool) -> Remat:
        """Return the rematerialisation of a layer.

        Args:
            is_routed: Whether its feed-forward has routed experts.
        """
        if self.remat_dense is None or is_routed:
            return self.remat
        return self.remat_dense

    @property
    def optimizer_memory(self) -> Literal["device", "host", "files"]:
        """Memory of the optimiser state between two updates."""
        return "device" if self.offload is None else self.offload.optimizer

    @property
    def parameter_memory(self) -> Literal["device", "host"]:
        """Memory of the parameters of layers and of their gradients."""
        return "device" if self.offload is None else self.offload.parameters

    @property
    def optimizer_parts(self) -> int:
        """Parts in which state outside of the device is updated."""
        return 1 if self.offload is None else self.offload.parts

    @property
    def update(self) -> Literal["whole", "parts", "files"]:
        """Name of how the optimiser is updated, in the catalogue."""
        if self.optimizer_memory == "files":
            return "files"
        return "parts" if self.updates_in_parts else "whole"

    @property
    def pipeline_order(self) -> PipelineOrder:
        """Order of the micro-batches on the stages of mesh.stage."""
        return self.pipeline or _ONE_GROUP_A_STAGE

    @property
    def backward(self) -> Literal["micro_batches", "pipeline"]:
        """Name of how the rows of a step are differentiated, in the catalogue."""
        return "pipeline" if self.mesh.stage > 1 else "micro_batches"

    @property
    def updates_in_parts(self) -> bool:
        """Whether the optimiser updates the layers of a stack apart."""
        is_away = self.parameter_memory == "host" or self.optimizer_memory == "files"
        return self.optimizer_parts > 1 or is_away

    @property
    def encoded_product(self) -> EncodedProduct | None:
        """Product in few bits that layers use; None for products in the compute dtype."""
        product = self.precision.matmul.build()
        if product is None or not self.precision.has_floating_weights:
            return None
        kernels = self.implementations
        return dataclasses.replace(
            product, dense=kernels.quantized_matmul, grouped=kernels.grouped_matmul
        )

    @property
    def implementations(self) -> KernelsConfig:
        """Implementation of each kernel; None for the measured one."""
        return self.kernels or KernelsConfig()

    def declaring(self) -> ExecutionConfig:
        """Return the execution with which parameters are declared: whole rows, on the device."""
        offload = self.offload
        if offload is not None:
            offload = dataclasses.replace(offload, parameters="device")
        return dataclasses.replace(self, offload=offload, halves=1)

    @property
    def state_layout(self) -> StateLayout:
        """Layout named by `rules`, on the axes of the folded mesh if there is a fold.

        Raises:
            ValueError: The fold does not fit the mesh, or the mesh has an open size.
        """
        return _state_layout(self.rules, self.mesh, self.mesh_fold)

    @property
    def cache_reading(self) -> CacheReading:
        """Part of the cache that a generated token attends to; all of it, except in decoding."""
        return WHOLE_CACHE

    @property
    def mesh_fold(self) -> MoEMesh | None:
        """Fold of the mesh: `fold`, and the cuts of mesh.seq that `sequence_parallel` needs."""
        return self.sequence_parallel.mesh_fold(self.fold, self.mesh.seq)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh, pieces of a folded one included."""
        return dict(zip(*named_sizes(self.mesh, self.mesh_fold), strict=True))

    @property
    def axis_rules(self) -> LogicalAxisRules:
        """Rules from logical axes of parameters and activations to mesh axes."""
        return self.state_layout.parameters

    @property
    def placement(self) -> Placement:
        """Operations that place arrays by `axis_rules`."""
        return Placement(self.axis_rules)


@functools.lru_cache(maxsize=4096)  # a search asks for each of thousands many times
def _state_layout(rules: StateLayoutName, mesh: MeshConfig, fold: MoEMesh | None) -> StateLayout:
    refinement = None if fold is None else refine(mesh.by_axis, fold).without_sizes
    return _layout_of_pieces(rules, mesh.stage != 1, refinement)


@functools.lru_cache(maxsize=256)  # so that meshes share what their rules remember
def _layout_of_pieces(
    rules: StateLayoutName, has_stages: bool, refinement: Refinement | None
) -> StateLayout:
    layout = STATE_LAYOUTS[rules]
    if has_stages:
        layout = layout.on_stages()
    return layout if refinement is None else layout.on_fold(refinement)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeRowsConfig(ExecutionConfig):
    """The execution of decoding: rows whole on every device that shares them.

    Only the caches are cut over `seq`. Experts are gathered to the tokens, because a token is on
    several devices at once.
    """

    reading: CacheReading = WHOLE_CACHE
    """Part of the cache that a generated token attends to. Other than whole, it changes the loss of
    generated tokens, and is therefore no field of `ExecutionConfig`."""

    @classmethod
    def of(cls, execution: ExecutionConfig, reading: CacheReading | None = None) -> WholeRowsConfig:
        """Return an execution whose rows are whole.

        Args:
            execution: How the model is computed.
            reading: Part of the cache that is read; that of `execution` when None.
        """
        fields = dataclasses.fields(ExecutionConfig)
        given: dict[str, Any] = {field.name: getattr(execution, field.name) for field in fields}
        given["dispatcher"], given["halves"] = LocalConfig(), 1
        return cls(**given, reading=execution.cache_reading if reading is None else reading)

    @property
    def cache_reading(self) -> CacheReading:
        """Part of the cache that a generated token attends to."""
        return self.reading

    @property
    def axis_rules(self) -> LogicalAxisRules:
        """Rules from logical axes of parameters and activations to mesh axes."""
        return self.state_layout.parameters.replace(act_seq=(), act_seq_inner=())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedConfig(WholeRowsConfig):
    """The execution of serving: all tokens of a step on every device.

    The batch of a step is one row, so that no mesh axis can cut it: heads and hidden units are cut
    over `tensor`, experts over `expert`.
    """

    @classmethod
    def of(cls, execution: ExecutionConfig) -> ServedConfig:
        """Return an execution whose tokens are whole, and which moves no weights."""
        served: Any = dataclasses.replace(super(ServedConfig, cls).of(execution), telemetry="brief")
        defaults: dict[str, Any] = {"dispatcher": ResidentConfig(), "rules": "data_parallel"}
        return dataclasses.replace(served, **defaults)

    @property
    def axis_rules(self) -> LogicalAxisRules:
        """Rules from logical axes of parameters and activations to mesh axes."""
        unsharded: dict[str, Any] = dict.fromkeys(("act_batch", "act_seq", "act_seq_inner"), ())
        return self.state_layout.parameters.replace(**unsharded)
