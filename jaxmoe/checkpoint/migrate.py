# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Brings the JSON of a config that an older version saved up to the config classes of today.

`jaxmoe.configs.from_json` is strict: a field that was added after a run was started is missing from
its `config.json` and from the manifests of its checkpoints. Every reader of those therefore calls
`migrate` first, which fills in such fields with the value that means "as before".

To add a field to a config class that runs save: `jaxmoe/checkpoint/migrate.py` (one line at the end
of `ADDED`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmoe.configs import TAG

JsonValue = None | bool | int | float | str | list | dict


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """A field that older configs lack."""

    path: str
    """Dotted path from the config of a run. `*` stands for every item of a list, and a segment
    `router[softmax_topk]` for `router` where it holds that member of its union."""
    value: JsonValue
    """JSON value with which the config means what it meant before the field existed."""


ADDED: tuple[Added, ...] = (
    Added("model.layers", []),
    Added("model.moe.kind", "moe"),
    Added("execution.precision.mixed", {"wide_fraction": 0.125, "block_size": None, "batches": 4}),
    Added("checkpoint.capture", "lazy"),
    Added("checkpoint.initial_state", "parameters"),
    Added("execution.pipeline", {"kind": "interleaved", "chunks": 1}),
    Added("checkpoint.on_lost_stage", "fail"),
    Added("checkpoint.recovery_steps", 100),
