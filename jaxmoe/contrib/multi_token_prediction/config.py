# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Modules that each predict one token further ahead, as a choice of `model.options.predictor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from jaxmoe.contrib.multi_token_prediction.drafts import DraftPrograms
from jaxmoe.contrib.multi_token_prediction.families import with_modules
from jaxmoe.contrib.multi_token_prediction.modules import first_inputs, module_scan
from jaxmoe.contrib.multi_token_prediction.serving import ModulesDrafter
from jaxmoe.models.predictor import Predictor
from jaxmoe.models.stacks import Layer, LayerStack, Scan
from sharding import axes as ax

if TYPE_CHECKING:
    from jaxmoe.execution import ExecutionConfig
    from jaxmoe.layers.records import Stream
    from jaxmoe.models.config import ModelConfig

MODULES: Final = "further_blocks"
"""First part of the paths of the parameters of the modules."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MultiTokenModulesConfig(Predictor):
    """Modules with a layer each that predict tokens further ahead (DeepSeek-V3)."""

    name: ClassVar[str] = "multi_token_prediction"
    objective: ClassVar[str] = "multi_token_prediction"

    depth: int = 1
    """Modules (K), of which module k predicts token k + 1 after the current one."""

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError(
                f"model.options.predictor.depth={self.depth} must be at least 1; without modules"
                " set model.options.predictor to None"
            )

    def check(self, model: ModelConfig) -> None:
        """Raise if a model cannot have the modules.

        Raises:
            ValueError: Its layers compute more than one stream.
        """
        if model.residual.arrays > 1 or model.kinds[-1].mixer.rearranges_rows:
            choice = f"model.residual:{model.residual.name}"
            if model.residual.arrays == 1:
                choice = f"{model.mixer_path(model.num_layers - 1)}:{model.kinds[-1].mixer.name}"
            raise ValueError(
                f"model.options.predictor has a layer on one residual stream, and {choice} has"
                " several: leave the predictor out, or choose another"
            )

    def scan(self, kinds: Sequence[Layer], num_moe: int) -> Scan:
        """Return the layers of the modules, of the kind of the model's last layer."""
        kind = kinds[-1]
        layers = range(len(kinds), len(kinds) + self.depth)
        is_routed = kind.feed_forward.is_routed
        moe_layers = range(num_moe, num_moe + self.depth) if is_routed else range(0)
        stack = LayerStack(MODULES, kind, layers, moe_layers)
        return Scan(MODULES, (stack,), axis=ax.OTHER_LAYERS)

    def declare(self, model: ModelConfig, execution: ExecutionConfig, stream: Stream) -> None:
        """Declare the parameters of the modules."""
        scan = model.further_scan
        assert scan is not None  # it is this config's
        inputs, tokens = first_inputs(model, stream)
        module_scan(scan, model, execution, train=False)(stream, inputs, tokens)

    def drafts(self) -> DraftPrograms:
        """Return the programs of one generation after the other, in which the modules draft."""
        return DraftPrograms()

    def drafter(self, model: ModelConfig, execution: ExecutionConfig, sizes: Any) -> ModulesDrafter:
        """Return what drafts in serving."""
        return ModulesDrafter(model, execution, sizes)

    def family(self, family: Any) -> Any:
        """Return a family whose config and tensors have the modules."""
        return with_modules(family, self, self.depth)
