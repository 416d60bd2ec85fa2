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
    Added("model.adapter", None),
    Added("model.moe.kind", "moe"),
    Added("execution.remat_dense", None),
    Added("execution.precision.mixed", {"wide_fraction": 0.125, "block_size": None, "batches": 4}),
    Added("checkpoint.capture", "lazy"),
    Added("checkpoint.initial_state", "parameters"),
    Added("execution.pipeline", {"kind": "interleaved", "chunks": 1}),
    Added("execution.pipeline[interleaved].weight_gradients", "at_once"),
    Added("checkpoint.on_lost_stage", "fail"),
    Added("checkpoint.recovery_steps", 100),
    Added("replicas", {"kind": "none"}),
    *(
        Added(f"data[{source}].partition", None)
        for source in ("corpus", "files", "mixture", "huggingface", "language_mixture")
    ),
    Added("training.skipping", None),
    Added("watch.links_every", 0),
    Added("execution.host_order", []),
    Added("execution.optimizer_parts", 1),
    Added("model.residual", {"kind": "standard"}),
    Added("execution.tensor_products", {"kind": "whole"}),
    Added("training.assign", {"kind": "buckets"}),
    Added("execution.fold.seq_cuts", []),
    Added("execution.kernels.state_space_dual", None),
    Added("execution.kernels.selective_scan", None),
    Added("execution.parameter_memory", "device"),
    Added("execution.halves", 1),
    Added("model.loop", None),
    Added("training.gradients", {"kind": "backprop"}),
    Added("training.average", None),
    *(
        Added(f"{mixer}[{kind}].{field}", value)
        for mixer in ("model.attention", "model.layers.*.mixer")
        for kind, fields in {
            "grouped_query": {"positions": "rotary"},
            "mamba": {"has_conv_bias": True, "has_projection_bias": False, "inner_norms": "none"},
            "mamba2": {"has_conv_bias": True, "has_projection_bias": False},
        }.items()
        for field, value in fields.items()
    ),
    Added("execution.optimizer_directory", ""),
    Added("rl", None),
    Added("parts", []),
)
"""Fields in the order in which they were added."""


def migrate(config: Mapping[str, Any], added: Sequence[Added] | None = None) -> dict[str, Any]:
    """Return a config's JSON with the fields that were added since it was saved.

    Args:
        config: JSON of the config of a run, or of a `ModelConfig` alone. Other JSON, which callers
            of `save_checkpoint` may store, is returned unchanged.
        added: Fields to fill in; `ADDED` when None.

    Returns:
        A copy in which each missing field has its value. Fields that are there keep theirs.
    """
    fields = ADDED if added is None else added
    run = copy.deepcopy(dict(config))
    if _is_model(run):
        return _fill({"model": run}, fields)["model"]
    return _fill(run, fields) if isinstance(run.get("model"), dict) else run


def _is_model(config: Mapping[str, Any]) -> bool:
    return {"vocab_size", "embed_dim", "num_layers"} <= config.keys()


def _fill(run: dict[str, Any], added: Sequence[Added]) -> dict[str, Any]:
    """Fill in the fields, in place, where the object that holds them exists."""
    for field in added:
        *parents, name = field.path.split(".")
        if not parents and "checkpoint" not in run:
            continue  # a study has a model as well, and is no run
        for holder in _objects(run, parents):
            holder.setdefault(name, copy.deepcopy(field.value))
    return run


def _objects(value: Any, segments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects at a path, if any."""
    if not segments:
        if isinstance(value, dict):
            yield value
        return
    segment, rest = segments[0], segments[1:]
    if segment == "*":
        for item in value if isinstance(value, list) else ():
            yield from _objects(item, rest)
        return
    name, _, member = segment.removesuffix("]").partition("[")
    child = value.get(name) if isinstance(value, dict) else None
    if not member or (isinstance(child, dict) and child.get(TAG) == member):
        yield from _objects(child, rest)
