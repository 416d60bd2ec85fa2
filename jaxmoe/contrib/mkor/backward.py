# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Differentiates the loss of micro-batches by parameters and by probes of the dense matrices."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe import combinations
from jaxmoe.contrib.mkor.probes import TOKENS, probe_view, probed_rows, zero_probes
from jaxmoe.data.batch import Batch
from jaxmoe.layers.view import View
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

        Raises:
            ValueError: Gradients without a backward pass, pipeline stages, a layout that gathers
                parameters itself, products in 8 bits, an update in parts, or a mixer whose
                matrices have no probes.
        """
        optimizer = types.SimpleNamespace(name="mkor")
        combinations.check(
            model=step.model, optimizer=optimizer, execution=step.execution, training=step
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
