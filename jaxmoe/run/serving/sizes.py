# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes and policies of an engine, as the flags `--engine.*` of `serve` name them."""

from __future__ import annotations

import dataclasses
import re

from jaxmoe.models.diffuse import BUDGET
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.diffusion.config import DiffusionSizes, check_steps
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.policies.batching import BatchingConfig, SplitFuseConfig
from jaxmoe.serve.policies.dispatch import DispatchConfig, LeastLoadedConfig
from jaxmoe.serve.policies.retention import LRUConfig, RetentionConfig
from jaxmoe.serve.policies.scaling import FixedConfig, ScalingConfig

_LONGEST = 4096
"""Tokens of a request by default, where a model allows more."""
_SHORT = 512
"""Tokens of a request up to which attention reads a shorter table."""


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
    batching: BatchingConfig = SplitFuseConfig()
    """What a step computes."""
    instances: int = 1
    """Instances of the model, each on devices of its own; all share the devices where there are
    enough for one only."""
    dispatch: DispatchConfig = LeastLoadedConfig()
    """Which instance answers a request, and what moves between them."""
    retention: RetentionConfig = LRUConfig()
    """Which pages a request gets, and what becomes of those of a preempted one."""
    scaling: ScalingConfig = FixedConfig()
    """How many instances take requests, and on how many devices each is."""
    steps_per_token: float = 1.0
    """Steps of a masked-diffusion model for each token of an answer."""
    logit_budget: int = BUDGET
    """Positions whose logits a masked-diffusion model computes at a time; a step fills about
    max_sequences / steps_per_token."""

    def __post_init__(self):
        for field in (
            *("max_sequences", "max_length", "pages", "page_size", "max_waiting", "instances"),
            "logit_budget",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"engine.{field}={value} must be at least 1")
        if self.num_logprobs < 0:
            raise ValueError(f"engine.num_logprobs={self.num_logprobs} must be 0 or more")
        check_steps("engine.steps_per_token", self.steps_per_token)
        roles = self.dispatch.roles(self.instances)
        self.scaling.check(roles=roles, has_power=False, has_objectives=False)
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
        self._refuse(
            ("steps_per_token", "logit_budget"),
            "is of masked-diffusion models, and this one writes from left to right",
        )
        lengths = self._lengths(length)
        most = lengths[-1]
        each = num_pages(most, self.page_size)
        pages = self.pages or max(each, self.max_sequences * each // 2)
        if pages < each:
            raise ValueError(
                f"engine.pages={pages} x engine.page_size={self.page_size} hold no request of"
                f" {most} tokens: set engine.pages to at least {each}, or a shorter"
                " engine.max_length"
            )
        return ExecutorConfig(
            num_pages=pages,
            page_size=self.page_size,
            shapes=self.shapes,
            context_lengths=lengths,
            num_logprobs=self.num_logprobs,
            has_experts=self.has_experts,
        )

    def rows(self, length: int) -> DiffusionSizes:
        """Return the sizes of the executor of a masked-diffusion model.

        Args:
            length: Tokens of a sequence that the model was trained for.

        Raises:
            ValueError: A field is of other models alone.
        """
        self._refuse(
            (
                "instances",
                "dispatch",
                "batching",
                "retention",
                "scaling",
                "pieces",
                "pages",
                "page_size",
                "num_logprobs",
                "has_experts",
            ),
            "is of models that write from left to right, and this one fills rows by masked"
            " diffusion; its sizes are max_sequences, max_length and logit_budget",
        )
        lengths = self._lengths(length)
        if lengths[-1] < 2:
            raise ValueError("engine.max_length=1 must be at least 2: a prompt and an answer")
        return DiffusionSizes(rows=self.max_sequences, lengths=lengths, budget=self.logit_budget)

    def _lengths(self, length: int) -> tuple[int, ...]:
        most = self.max_length or min(length, _LONGEST)
        return (_SHORT, most) if most > 2 * _SHORT else (most,)

    def _refuse(self, fields: tuple[str, ...], why: str) -> None:
        """Raise if one of the fields is not as it is by default."""
        plain = EngineSizesConfig()
        for field in fields:
            if (value := getattr(self, field)) != getattr(plain, field):
                raise ValueError(f"engine.{field}={value} {why}: leave it out")
