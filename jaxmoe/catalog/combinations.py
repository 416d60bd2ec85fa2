# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Says which choices load the rows of a vertical about what does not combine.

`jaxmoe/combinations.py` reads the table and imports the rows of a vertical when a config makes one
of its choices.

To add a vertical: `jaxmoe/contrib/<vertical>/combinations.py` with ROWS, and a row here for each of
its choices.
"""

from __future__ import annotations

from typing import Final

_ADAPTERS: Final = "jaxmoe.contrib.adapters.combinations:ROWS"
_ESTIMATORS: Final = "jaxmoe.contrib.estimators.combinations:ROWS"
_DEPTH: Final = "jaxmoe.contrib.depth.combinations:ROWS"
_OFFLOAD: Final = "jaxmoe.contrib.offload.combinations:ROWS"
_LAYERWISE: Final = "jaxmoe.contrib.layerwise.combinations:ROWS"
_FAMILY_LAYERS: Final = "jaxmoe.contrib.family_layers.combinations:ROWS"
_LEVELS: Final = "jaxmoe.contrib.levels.combinations:ROWS"
_LINEAR_ATTENTION: Final = "jaxmoe.contrib.linear_attention.combinations:ROWS"
_MKOR: Final = "jaxmoe.contrib.mkor.combinations:ROWS"
_MULTI_TOKEN: Final = "jaxmoe.contrib.multi_token_prediction.combinations:ROWS"
_RL: Final = "jaxmoe.contrib.rl.combinations:ROWS"
_SLOW_LINKS: Final = "jaxmoe.contrib.slow_links.combinations:ROWS"
_TELEMETRY: Final = "jaxmoe.contrib.telemetry.combinations:ROWS"

ADDRESSES: Final[tuple[tuple[str, tuple[str | int, ...], str], ...]] = (
    ("model.adapter", ("mixture_of_shards", "shared_store", "switch_lora", "remix"), _ADAPTERS),
    ("training.average", (), _ADAPTERS),
    ("execution.halves", (2,), _DEPTH),
    ("model.mixers.*", ("parallel_streams",), _DEPTH),
    ("model.loop", (), _DEPTH),
    ("model.layers.feed_forward", ("two_sizes",), _DEPTH),
    ("execution.offload.parameters", ("host",), _OFFLOAD),
    ("execution.offload.optimizer", ("files",), _OFFLOAD),
    ("execution.offload.directory", (), _OFFLOAD),
    ("training.skipping", (), _DEPTH),
    ("training.gradients.is_backward", (False,), _ESTIMATORS),
    ("replicas.exchanges", ("parameters", "gradients"), _SLOW_LINKS),
    ("training.objective", ("swept_layers",), _LAYERWISE),
    ("execution.sequence_parallel", ("levels",), _LEVELS),
    ("model.mixers.*", ("lightning",), _LINEAR_ATTENTION),
    ("model.mixers.*", ("sparse_latent",), _FAMILY_LAYERS),
    ("model.options.predictor", ("multi_token_prediction",), _MULTI_TOKEN),
    ("optimizer", ("mkor",), _MKOR),
    ("rl", (), _RL),
    ("training.objective", ("policy_gradient",), _RL),
    ("parts.*", ("gradient_comparison",), _TELEMETRY),
)
"""Dotted path of a choice, names of its members or its values (any value that is set where there
are none), and the address of the rows."""
