# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a config.json under any of their names.

Values that this library does not compute are an error; fields that are never read are logged.
Version 4 of transformers writes a flat rope_theta, version 5 rope_parameters; Qwen3-MoE's
num_experts became num_local_experts. Both are read.

To add a field that changes no number: `jaxmoe/checkpoint/huggingface/fields.py` (`_IGNORED`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest

logger = logging.getLogger(__name__)

# Fields with one supported value, and the reason.
_ONLY: Final = {
    "hidden_act": ("silu", "every feed-forward here is a SwiGLU"),
    "attention_bias": (False, "projections of this family have no bias"),
    "mlp_bias": (False, "projections here have no bias"),
    "clip_qkv": (None, "queries, keys and values of this family are not clipped"),
    "attention_dropout": (0.0, "there is no dropout here; set it to 0 if it was used in training"),
    "router_jitter_noise": (0.0, "this router has no noise; set it to 0 if it was for training"),
    "partial_rotary_factor": (1.0, "RoPE here rotates whole heads"),
    "is_encoder_decoder": (False, "models here are decoders"),
}

# Fields that change neither logits nor loss.
_IGNORED: Final = frozenset(
    "architectures _name_or_path transformers_version torch_dtype dtype auto_map use_cache"
    " _attn_implementation _attn_implementation_autoset attn_implementation"
    " _experts_implementation experts_implementation initializer_range max_position_embeddings"
    " max_window_layers output_router_logits output_attentions output_hidden_states return_dict"
    " pad_token_id bos_token_id eos_token_id sep_token_id eod_token_id chunk_size_feed_forward"
    " problem_type id2label label2id pretraining_tp quantization_config rope_parameters"
    " rope_scaling rope_theta model_type".split()
)


def usual_names(
    config: Mapping[str, Any], parts: tuple[str, ...], names: Mapping[str, tuple[str, Any]]
) -> dict[str, Any]:
    """Return the fields of a config under the names of other families.

    Args:
        config: Fields of config.json.
        parts: Names of fields that are objects with further fields, which are united with the rest.
        names: The usual name of a field and its default, by its name in the config; names of fields
            of a part are `part.name`.

    Raises:
        CheckpointError: A field is there under both names with different values.
    """
    flat = {name: value for name, value in config.items() if name not in parts}
    usual = {name: value for name, value in flat.items() if name not in names}
    for part in parts:
        for name, value in (config.get(part) or {}).items():
            flat[f"{part}.{name}"] = value
            if f"{part}.{name}" not in names:
                usual.setdefault(name, value)
    fields = Fields(flat)
    for name, (other, default) in names.items():
        usual[other] = fields.get(name, other, default=default)
    return usual


class Fields:
    """Fields of a config; remembers which of them were read."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self._asked: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of a field that has several names; `default` if absent or null.

        Raises:
            CheckpointError: Two of the names have different values.
        """
        self._asked.update(names)
        values = {name: self._fields[name] for name in names if self._fields.get(name) is not None}
        if len(set(map(repr, values.values()))) > 1:
            assignments = " and ".join(f"{name}={value!r}" for name, value in values.items())
            raise CheckpointError(f"the config has {assignments}, two names of one field")
        return next(iter(values.values()), default)

    def there(self, *names: str) -> Any:
        """Return the value of a required field."""
        value = self.get(*names)
        if value is None:
            near = closest(names[0], self._fields)
            raise CheckpointError(f"the config has no {' or '.join(names)}{near}")
        return value

    def size(self, *names: str) -> int:
        """Return the value of a required field, an integer above 0."""
        value = self.there(*names)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.{names[0]}={value!r} must be an integer above 0")
        return value

    def size_or_null(self, name: str) -> int | None:
        """Return the value of a field that must be present, None if it is null."""
        if name not in self._fields:
            raise CheckpointError(
                f"the config has no {name}{closest(name, self._fields)}: write null for none"
            )
        return None if self.get(name) is None else self.size(name)

    def only(self, name: str, supported: Any, why: str) -> None:
        """Raise for any value of a field but one (null counts as absent)."""
        value = self.get(name, default=supported)
        if value != supported:
            raise CheckpointError(
                f"config.{name}={show_value(value)} is not supported, only {supported!r}: {why}"
            )

    def check_supported(self) -> None:
        """Raise for values of fields that no family has read and that have one supported value."""
        for name, (supported, why) in _ONLY.items():
            if name not in self._asked:
                self.only(name, supported, why)

    def warn_of_the_rest(self) -> None:
        """Log the fields that were not read and are not known to be harmless."""
        unread = sorted(self._fields.keys() - self._asked - _IGNORED)
        if unread:
            logger.warning("config fields unknown to jaxmoe, ignored: %s", ", ".join(unread))
