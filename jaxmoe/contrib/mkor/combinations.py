# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with this optimiser; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, member, that, trait
from jaxmoe.combinations import gathered_row

_MKOR: Final = member("optimizer", "mkor")

ROWS: Final = (
    Row(
        _MKOR,
        trait("training.gradients", "is_backward", "without a backward pass", value=False),
        "{second} has no backward pass, and {first} reads output gradients",
        "choose another optimizer, or set training.gradients to backprop",
    ),
    Row(
        _MKOR,
        above("execution.mesh.stage", 1),
        "{first} measures every dense matrix, and a stage of {second} has some of the layers",
        "set execution.mesh.stage to 1",
    ),
    gathered_row(_MKOR),
    Row(
        _MKOR,
        that(
            "model.mixers.*",
            "whose matrices have no probes",
            lambda mixer: not mixer.can_quantize,
            shown="model.attention",
        ),
        "{first} measures every dense matrix, and those of {second} cannot be measured",
        "choose optimizer:adamw, or another mixer",
    ),
    Row(
        _MKOR,
        that(
            "execution",
            "in few bits",
            lambda execution: execution.encoded_product is not None,
            shown="execution.precision.matmul",
        ),
        "{first} measures every dense matrix, and {second} rounds their operands",
        "set execution.precision.matmul to full",
    ),
    Row(
        _MKOR,
        that(
            "execution",
            "in parts",
            lambda execution: execution.updates_in_parts,
            shown="execution.offload.parts",
        ),
        "{first} has statistics of all layers, and with {second} layers are updated apart",
        "set execution.offload.parts to 1, and execution.offload.optimizer to device",
    ),
)
