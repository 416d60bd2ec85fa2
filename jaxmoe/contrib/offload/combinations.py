# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with state outside of the devices; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Choice, Row, above, differs, equals, is_set, member
from sharding.state_layouts import STATE_LAYOUTS

_HOST: Final = equals("execution.offload.parameters", "host")
_FILES: Final = equals("execution.offload.optimizer", "files")
_STAGES: Final = above("execution.mesh.stage", 1)
_LAYOUTS: Final = tuple(name for name, layout in STATE_LAYOUTS.items() if layout.is_streamable)


def _file_row(choice: Choice, reason: str, way_out: str) -> Row:
    """Return a row about optimiser state in files."""
    return Row(_FILES, choice, reason, f"{way_out}, or execution.offload.optimizer to host")


def _host_row(choice: Choice, reason: str, way_out: str) -> Row:
    """Return a row about parameters in host memory."""
    reason = f"{{first}} brings the parameters of layers one at a time, and {reason}"
    return Row(_HOST, choice, reason, f"{way_out}, or execution.offload.parameters to device")


ROWS: Final = (
    Row(
        is_set("execution.offload.directory"),
        differs("execution.offload.optimizer", "files"),
        "{first} is for the files of an optimiser, and {second} has none",
        "leave it out, or set execution.offload.optimizer to files",
    ),
    _file_row(
        _STAGES,
        "{first} updates one part after another, and {second} splits layers over devices",
        "set execution.mesh.stage to 1",
    ),
    _file_row(
        _HOST,
        "{first} updates one part after another, and {second} brings parameters with state in host"
        " memory",
        "set execution.offload.parameters to device",
    ),
    _file_row(
        differs("execution.telemetry", "brief"),
        "{first} updates one part after another, and {second} compares the parameters with all of"
        " their updates",
        "set execution.telemetry to brief",
    ),
    _file_row(
        member("parts.*", "recomputation", shown="parts"),
        "{second} copies the optimizer state, and {first} keeps it out of memory",
        "leave recomputation out of parts",
    ),
    _file_row(
        member("parts.*", "snapshots", shown="parts"),
        "{second} copies the optimizer state, and {first} keeps it out of memory",
        "leave snapshots out of parts",
    ),
    _file_row(
        member("parts.*", "check_free", shown="parts"),
        "{second} keeps gradient norms, and {first} writes parameters over the gradients",
        "leave check_free out of parts",
    ),
    _host_row(
        differs("execution.remat", "full", "offload"),
        "{second} keeps values made of them for the backward pass",
        "set execution.remat to full or offload",
    ),
    _host_row(
        differs("execution.remat_dense", "full", "offload"),
        "{second} keeps values made of them for the backward pass",
        "set execution.remat_dense to full or offload",
    ),
    _host_row(
        _STAGES,
        "{second} keeps those of a stage on its devices",
        "set execution.mesh.stage to 1",
    ),
    _host_row(
        differs("execution.rules", *_LAYOUTS),
        "{second} lays all of them out again in a step",
        f"set execution.rules to {' or '.join(_LAYOUTS)}",
    ),
    _host_row(
        differs("execution.telemetry", "brief"),
        "{second} compares all of them with their updates",
        "set execution.telemetry to brief",
    ),
)
