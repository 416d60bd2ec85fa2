# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`ExecutorConfig`: sizes of what an executor compiles and allocates."""

from __future__ import annotations

import dataclasses

from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.plan import Shapes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Sizes of what is compiled and allocated."""

    num_pages: int = 1024
    """Pages of the pool."""
    page_size: int = 16
    """Tokens of a page (G)."""
    shapes: Shapes = Shapes(singles=8, pieces=((1, 64),))
    """Single tokens and pieces of a step."""
    context_lengths: tuple[int, ...] = (2048,)
    """Tokens of a sequence that attention reads, ascending; a step takes the smallest that holds
    its sequences, and the last is the most that a sequence may have."""
    layers_apart: int = 16
    """Models of up to so many layers are compiled without a loop over them: a step reads the
    weights of each in place, from a copy of the parameters. Those of more layers are smaller to
    compile, and a loop copies the weights of a layer where it reads them. 0: always a loop."""
    num_logprobs: int = 0
    """Most likely tokens whose log-probabilities a request may ask for."""
    has_experts: bool = False
    """Whether a request may ask for the chosen experts. They are kept in host memory for every
    token in a page, a number of 1 or 2 bytes for each MoE layer and slot."""

    drafts: bool = False
    """Whether modules of the model draft tokens that a step checks together, see `drafting.py`.
    Steps then start when the one before has ended."""

    def __post_init__(self):
        lengths = self.context_lengths
        if not lengths or min(lengths) < 1 or sorted(set(lengths)) != [*lengths]:
            raise ValueError(
                f"context_lengths={lengths} must be one or more lengths above 0, ascending"
            )
        if self.layers_apart < 0:
            raise ValueError(f"layers_apart={self.layers_apart} must be 0 (a loop) or above")
        if self.num_pages < 1 or self.page_size < 1:
            raise ValueError(
                f"num_pages={self.num_pages} and page_size={self.page_size} must be above 0"
            )
        num_tokens = self.num_pages * self.page_size
        if num_tokens < lengths[-1]:
            raise ValueError(
                f"num_pages={self.num_pages} x page_size={self.page_size} hold {num_tokens}"
                f" tokens, and"
                f" context_lengths allows a sequence of {lengths[-1]}: set num_pages to"
                f" {num_pages(lengths[-1], self.page_size)}, or shorter context_lengths"
            )
