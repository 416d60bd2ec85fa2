# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes and policies of an engine, as the flags `--engine.*` of `serve` name them."""

from __future__ import annotations

import dataclasses
import re

from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.policies.batching import BatchingConfig, SplitFuseConfig
from jaxmoe.serve.policies.retention import LRURetentionConfig, RetentionConfig

_LONGEST = 4096
"""Tokens of a request by default, where a model allows more."""
_SHORT = 512
"""Tokens of a request up to which attention reads a shorter table."""
_MOST_STEPS = 1000
"""Steps of a token at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizesConfig:
    """Sizes of an engine: what is compiled and allocated at the start."""

    max_sequences: int = 16
    """Requests that are computed together; the others wait."""
    pieces: tuple[str, ...] = ("1x256", "4x64")
    """Shapes of the parts of prompts in a step, number x tokens; one program is compiled for each,
    and one for a step without."""
    max_length: int | None = None
    """Tokens of a request, its answer included; what the model was trained for, at most 4096, when
    None."""
    pages: int | None = None
    """Pages of keys and values; enough for all sequences at half of the length when None."""
    page_size: int = 16
    """Tokens of a page."""
    max_waiting: int = 256
    """Requests that may wait; further ones are refused."""
    num_logprobs: int = 5
    """Most likely tokens whose log-probabilities a request may ask for."""
    has_experts: bool = False
    """Whether a request may ask for the experts of each token, which are then kept in host memory
    for every token in a page."""
    drafts: bool = False
    """Whether modules of the model draft tokens that it checks together; no answer changes."""
    batching: BatchingConfig = SplitFuseConfig()
    """What a step computes."""
    retention: RetentionConfig = LRURetentionConfig()
    """Which pages a request gets, and what becomes of those of a preempted one."""
    steps_per_token: float = 1.0
    """Steps of a masked-diffusion model for each token of an answer."""
    logit_budget: int = 64
    """Positions whose logits a masked-diffusion model computes at a time; a step fills about
    max_sequences / steps_per_token."""

    def __post_init__(self):
        for field in (
            "max_sequences",
            "max_length",
            "pages",
            "page_size",
            "max_waiting",
            "logit_budget",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"engine.{field}={value} must be at least 1")
        if self.num_logprobs < 0:
            raise ValueError(f"engine.num_logprobs={self.num_logprobs} must be 0 or more")
        if not 0.0 < self.steps_per_token <= _MOST_STEPS:
            raise ValueError(
                f"engine.steps_per_token={self.steps_per_token} must be above 0 and at most"
                f" {_MOST_STEPS}"
            )
        if not self.pieces:
            raise ValueError("engine.pieces is empty: name a shape for prompts, such as 1x256")
        for piece in self.pieces:
            if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", piece):
                raise ValueError(
                    f"engine.pieces={piece} must be number x tokens, such as 4x64: 4 prompts, 64"
                    " tokens of each"
                )

    @property
    def shapes(self) -> Shapes:
        """Compiled shapes of a step."""
        pieces = (tuple(map(int, piece.split("x"))) for piece in self.pieces)
        return Shapes(
            singles=self.max_sequences, pieces=tuple((count, size) for count, size in pieces)
        )

    def executor(self, length: int) -> ExecutorConfig:
        """Return the sizes of the executor.

        Args:
            length: Tokens of a sequence that the model was trained for.

        Raises:
            ValueError: The pages hold no whole request, or a field is of masked diffusion alone.
        """
        self.refuse(
            ("steps_per_token", "logit_budget"),
            "is of masked-diffusion models, and this one writes from left to right",
        )
        lengths = self.lengths(length)
        most = lengths[-1]
        each = num_pages(most, self.page_size)
        pages = self.pages or max(each, self.max_sequences * each // 2)
        if pages < each:
            raise ValueError(
                f"engine.pages={pages} must be at least {each}, to hold a request of {most} tokens"
                f" with engine.page_size={self.page_size}: set it so, or a shorter"
                " engine.max_length"
            )
        return ExecutorConfig(
            num_pages=pages,
            page_size=self.page_size,
            shapes=self.shapes,
            context_lengths=lengths,
            num_logprobs=self.num_logprobs,
            has_experts=self.has_experts,
            drafts=self.drafts,
        )

    def lengths(self, length: int) -> tuple[int, ...]:
        """Return the numbers of tokens of a sequence for which steps are compiled.

        Args:
            length: Tokens of a sequence that the model was trained for.
        """
        most = self.max_length or min(length, _LONGEST)
        return (_SHORT, most) if most > 2 * _SHORT else (most,)

    def refuse(self, fields: tuple[str, ...], why: str) -> None:
        """Raise if one of some fields is not as it is by default.

        Args:
            fields: Fields that the model has no use for.
            why: Reason, behind the field and its value.

        Raises:
            ValueError: Names the field.
        """
        plain = type(self)()
        for field in fields:
            if (value := getattr(self, field)) != getattr(plain, field):
                raise ValueError(f"engine.{field}={value} {why}: leave it out")
