# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tells where the optimiser state lies that is kept in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.restore import Begun
from jaxmoe.run.supervision import Supervision
from jaxmoe.training.optimizer_files.part_files import PartFiles


class OptimizerFiles(RunPart):
    """Describes the files in header and summary.

    Args:
        config: Unused.
        directory: Unused.
        supervision: Unused.
    """

    _files: PartFiles

    def __init__(self, config: PretrainConfig, directory: RunDirectory, supervision: Supervision):
        del config, directory, supervision

    def restored(self, begun: Begun) -> None:
        """Note the files, which the run has opened."""
        assert begun.assembly.files is not None  # with `execution.optimizer_memory=files`
        self._files = begun.assembly.files

    def heading(self, assembly: Assembly) -> Sequence[str]:
        """Return number, size and directory of the files."""
        del assembly
        files = self._files
        return (
            f"moments  {files.size / 1e6:.1f} MB in {len(files.layouts)} files, read and written"
            f" once a step: {files.directory}",
        )

    def rows(self) -> Mapping[str, Any]:
        """Return directory, size and speed of the files."""
        return {"optimizer_files": self._files.facts()}
