# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`RunPartConfig`: base class of the members of `parts`, which name what a run does besides."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPartConfig(abc.ABC):
    """Base class of the configs of run parts.

    A part changes nothing that a run resumed without it needs: no state, no order of the data.
    """

    name: ClassVar[str]
    """Name in the catalogue, in config files and on the command line."""

    @abc.abstractmethod
    def build(self, directory: Any, supervision: Any) -> Any:
        """Return the part for one start of a run, a `jaxmoe.run.parts.base.RunPart`.

        Args:
            directory: Directory of the run, which is not held yet:
                `jaxmoe.run.directory.RunDirectory`.
            supervision: Watchdog, signals and resources of this process:
                `jaxmoe.run.supervision.Supervision`.

        Raises:
            ValueError: The run cannot have this part.
        """
