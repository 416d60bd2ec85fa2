# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Differentiates the loss of micro-batches by parameters and by probes of the dense matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.contrib.mkor.probes import TOKENS, probe_view, probed_rows, zero_probes
from jaxmoe.data.batch import Batch
from jaxmoe.layers.view import View, check_view
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.gradients import MicroBatchBackward

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, slots=True)
class ProbedBackward(MicroBatchBackward):
    """One micro-batch after the other, with probes of the dense matrices."""

    name: ClassVar[str] = "probed"

    def check(self, step: Step) -> None:
        """Refuse what the matrices cannot be measured with.

        Args:
            step: With the mesh resolved.

        Raises:
            ValueError: Gradients without a backward pass, pipeline stages, a layout that gathers
                parameters itself, products in 8 bits, an update in parts, or a mixer whose
                matrices have no probes.
        """
        execution = step.execution
        start = "optimizer:mkor measures every dense matrix"
        if not step.gradients.is_backward:
            raise ValueError(
                f"training.gradients:{step.gradients.name} has no backward pass, and optimizer:mkor"
                " reads output gradients: choose another optimizer"
            )
        if execution.mesh.stage > 1:
            raise ValueError(
                f"{start}, and a stage has some of the layers: execution.mesh.stage="
                f"{execution.mesh.stage} must be 1"
            )
        check_view(execution)
        if execution.encoded_product is not None:
            raise ValueError(
                f"{start}, and execution.precision.matmul rounds their operands: set it to full"
            )
        if execution.updates_in_parts:
            raise ValueError(
                f"{start}, and its statistics are those of all layers: set"
                " execution.offload.parts to 1"
            )
        for kind in step.model.kinds:
            if not kind.mixer.can_quantize:
                raise ValueError(
                    f"{start}, and those of the mixer {kind.mixer.name!r} cannot be measured:"
                    " choose optimizer:adamw"
                )

    def differentiate(
        self,
        step: Step,
        loss_of: Callable[..., tuple[Array, Any]],
        trained: Any,
        batch: Batch,
    ) -> tuple[Any, dict[str, Any], Any]:
        """Return gradients, statistics of the matrices as `stats`, and what is aside."""
        cycles = [scan.name for scan in step.model.scans if scan.is_cycle]
        table = parameter_table(step.model) if step.table is None else step.table

        def probed_loss(trained: Any, probes: Any) -> tuple[Array, Any]:
            view: View = probe_view(probes, cycles)
            return loss_of(trained, view)

        zeros = zero_probes(probed_rows(table))
        (grads, stats), aside = jax.grad(probed_loss, (0, 1), has_aux=True)(trained, zeros)
        return grads, {"stats": stats | {TOKENS: jnp.float32(batch.tokens.size)}}, aside
