# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Config of a trace of a few steps."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """A trace of a few steps, for xprof or Perfetto."""

    steps: str | None = None
    """First and last traced step as a:b, both included, from 1; None for no trace."""

    def __post_init__(self):
        if self.steps is None:
            return
        if re.fullmatch(r"\d{1,12}:\d{1,12}", self.steps) is None:
            raise ValueError(
                f"profile.steps={self.steps!r} must be two step numbers a:b, such as 10:13"
            )
        first, last = map(int, self.steps.split(":"))
        if not 1 <= first < last:
            raise ValueError(
                f"profile.steps={self.steps} must have 1 <= a < b: the first step is 1, and a"
                " trace needs two steps or more"
            )

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last traced step."""
        if self.steps is None:
            return None
        first, last = map(int, self.steps.split(":"))
        return first, last
