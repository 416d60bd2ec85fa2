# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`TokenGiven`: what an objective reads beside the likelihood of a token.

An objective is a member of `ObjectiveConfig` with these members:

    num_examined                    passes over a held-out batch
    check(model)                    raises if the model cannot be trained with it
    num_predicted(model)            ids below this number may be predicted
    num_tokens(batch)               divisor of the summed loss
    row_tokens(batch)               the part of each row in `num_tokens`, [B]
    prepare(model, batch, key, placement)     the batch of a training step
    examine(model, batch, index, placement)   pass `index` over a held-out batch
    token_loss(nll, given)          loss of each token, [B S]
    further_loss(...)               a term of training passes beside it, or None

To add an objective: a config in a file beside `jaxmoe/training/next_token.py`, and a line in the
union of `jaxmoe/training/__init__.py`.
"""

from __future__ import annotations

import typing

from flax import struct
from jaxtyping import Array, Float, Shaped


# Not checked at run time: tree functions also fill records with shapes and specs.
@typing.no_type_check
@struct.dataclass
class TokenGiven:
    """Arrays per token that `token_loss` receives, for some positions of a batch."""

    weights: Float[Array, "B S"]
    """`Batch.loss_weights`."""
    extra: dict[str, Shaped[Array, "B S ..."]] = struct.field(default_factory=dict)
    """`Batch.extra`."""
