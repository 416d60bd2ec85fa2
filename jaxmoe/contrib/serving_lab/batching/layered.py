# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a whole prompt through one group of layers per step, so that experts are read once for it.

Source: layered prefill (arXiv:2510.08055). A prompt cut into pieces reads the experts of every
layer once per piece; cut into groups of layers it reads each layer once. Which prompts share a step
is left open there: here one at a time, or several short ones of one group.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from jaxmoe.contrib.serving_lab.batching.base import SimulatedBatchingConfig
from jaxmoe.contrib.serving_lab.layers import LayersDraft
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import Batching
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayeredConfig(SimulatedBatchingConfig):
    """A group of layers of a whole prompt per step, with all layers of decoding."""

    name: ClassVar[str] = "layered"
    needs: ClassVar[frozenset[str]] = frozenset({"layers"})

    chunk: int = 512
    """Tokens of a prompt per group of layers."""

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be at least 1 token")

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""

        def next_layers(done: int, count: int) -> tuple[int, int] | None:
            groups = min(-(-count // self.chunk), facts.num_layers)
            if groups == 1:
                return None
            borders = [facts.num_layers * i // groups for i in range(groups + 1)]
            return done, next(b for b in borders if b > done)

        def plan(view: InstanceView) -> Plan:
            draft = LayersDraft(view)
            draft.decode()
            prompts = sorted(draft.prompts(), key=lambda sequence: -draft.layers_done(sequence))
            num_used = 0
            for sequence in itertools.chain(prompts, view.waiting):
                count = draft.piece_size(sequence)
                if num_used and num_used + count > self.chunk:
                    break
                layers = next_layers(draft.layers_done(sequence), count)
                num_taken = draft.layers_piece(sequence, count, layers)
                if not num_taken:
                    break
                num_used += num_taken
            return draft.plan()

        return plan
