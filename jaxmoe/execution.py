# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`ExecutionConfig`: where and how a model is computed. It never changes the loss beyond rounding,
but for `precision.matmul`, which rounds to 8 bits where it is asked to; a resumed run must keep it.

What is computed is `ModelConfig`. The two meet in `Transformer(model, execution)` and nowhere else,
which is why a checkpoint restores on any mesh.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxmoe.precision import PrecisionPolicy, kernels_of_products
from pallas_kernels.backend import Implementation
from sharding.constrain import Placement
from sharding.expert_parallel import DispatcherConfig, LocalConfig
from sharding.fold import MoEMesh, refine
from sharding.mesh import MeshConfig
from sharding.products.halo import HaloProduct
from sharding.rules import LogicalAxisRules
from sharding.sequence_parallel import (
    NoSequenceParallelConfig,
    SequenceParallelConfig,
)
from sharding.state_layouts import STATE_LAYOUTS, StateLayout, StateLayoutName

Remat = Literal["none", "full", "dots", "offload"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """Which implementation of each kernel runs; None picks one that works and says which."""

    attention: Implementation | None = None
    """Of `pallas_kernels.flash_attention`."""
    grouped_swiglu: Implementation | None = None
    """Of `pallas_kernels.grouped_swiglu`, the experts."""
    quantized_matmul: Implementation | None = None
    """Of `pallas_kernels.quantized_matmul`, dense products in few bits."""
    grouped_matmul: Implementation | None = None
    """Of `pallas_kernels.grouped_matmul`, the experts in few bits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionConfig:
    """Mesh, layout rules, dispatcher, kernels, precision and rematerialisation."""

    mesh: MeshConfig = MeshConfig(data=-1)
    """Sizes of the mesh axes; the training commands make this mesh and set it."""
    fold: MoEMesh | None = None
    """Another layout of the same devices for the experts; mesh.expert is then 1."""
    rules: StateLayoutName = "fully_sharded"
    """How parameters, gradients and optimiser state are cut: sharding/state_layouts.py."""
    dispatcher: DispatcherConfig = LocalConfig()
    """How rows reach their experts."""
    sequence_parallel: SequenceParallelConfig = NoSequenceParallelConfig()
    """How attention spreads the positions of a sequence."""
    kernels: KernelsConfig = KernelsConfig()
    """Implementations of the kernels."""
    precision: PrecisionPolicy = PrecisionPolicy()
    """Dtypes."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing; each whole block; all but matrix products; or
    each whole block, from an input that waited in the memory of the host."""
    optimizer_memory: Literal["device", "host"] = "device"
    """Where the optimiser's state is between two updates."""
    unroll: int = 1
    """Layers in one iteration of the loop over equal layers: more compile longer and run faster on
    a CPU, where the loop copies what it carries."""
    telemetry: Literal["brief", "detailed"] = "brief"
    """What is measured: the load of the routers; or as well all of
    jaxmoe/routing/telemetry/detailed.py and, per layer, the indicators of instability of
    jaxmoe/layers/indicators.py, at the price of a second pass of the experts."""
    loss_chunk: int = 0
    """Positions whose logits exist at a time in the loss; 0: all at once."""

    def __post_init__(self):
        inner = 1 if self.fold is None else self.fold.seq_inner
        self.sequence_parallel.check_mesh(seq=self.mesh.seq, seq_inner=inner)
        if self.fold is not None and -1 not in self.mesh.sizes:
            refine(self.mesh.by_axis, self.fold)
        self._check_kernels()
        if self.unroll < 1:
            raise ValueError(f"execution.unroll={self.unroll} must be at least 1")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk={self.loss_chunk} must be 0 (whole) or positive")

    def _check_kernels(self) -> None:
        """Refuses an implementation that nothing would run."""
        matmul = self.precision.matmul
        for name, other in kernels_of_products().items():
            asked = getattr(self.kernels, name)
            if asked is not None and name not in matmul.kernels:
                raise ValueError(
                    f"execution.kernels.{name}={asked} computes nothing where"
                    f" execution.precision.matmul is {matmul.name!r}: leave it out, or set"
                    f" execution.precision.matmul to {other}"
                )

    @property
    def halo(self) -> HaloProduct | None:
        """How layers multiply in few bits; None: they do not, or their weights have few bits."""
        product = self.precision.matmul.build()
        if product is None or self.precision.weights != "floating":
            return None
        kernels = self.kernels
        return dataclasses.replace(
            product, dense=kernels.quantized_matmul, grouped=kernels.grouped_matmul
        )

    @property
    def state_layout(self) -> StateLayout:
        """The layout by name, on the axes of the folded mesh if there is a fold.

        Raises:
            ValueError: the fold does not fit the mesh, or the mesh has an open size.
        """
        layout = STATE_LAYOUTS[self.rules]
        return layout if self.fold is None else layout.folded(refine(self.mesh.by_axis, self.fold))

    @property
    def axis_rules(self) -> LogicalAxisRules:
        """The rules of parameters and activations."""
        return self.state_layout.parameters

    @property
    def placement(self) -> Placement:
        """The operations that place arrays by these rules."""
        return Placement(self.axis_rules)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeRowsConfig(ExecutionConfig):
    """The same with all tokens of a row on every device that shares it: for few new tokens.

    Only a cache of keys and values is cut over `seq` then. Experts are gathered where their tokens
    are, which stand on several devices at once.
    """

    @classmethod
    def of(cls, execution: ExecutionConfig) -> WholeRowsConfig:
        """The execution without the cuts of its rows."""
        fields = dataclasses.fields(ExecutionConfig)
        given: dict[str, Any] = {field.name: getattr(execution, field.name) for field in fields}
        given["dispatcher"] = LocalConfig()
        return cls(**given)

    @property
    def axis_rules(self) -> LogicalAxisRules:
        """The rules of parameters and activations."""
        return self.state_layout.parameters.replace(act_seq=(), act_seq_inner=())
