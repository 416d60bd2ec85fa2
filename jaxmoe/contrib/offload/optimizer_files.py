# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Opens the files that keep the optimiser state of a run, and tells where they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.contrib.offload.files_step import UpdateFromFiles, open_files
from jaxmoe.contrib.offload.part_files import PartFiles
from jaxmoe.execution import OffloadConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.parts import ConfiguredPart


class OptimizerFiles(ConfiguredPart):
    """Opens the files, lets the step update from them, and describes them in header and summary."""

    _files: PartFiles

    def prepare(self, assembly: Assembly) -> Assembly:
        """Return the run with a step that updates from the files, which are opened."""
        offload = assembly.execution.offload or OffloadConfig()
        where = offload.directory or str(self.directory.path / "optimizer")
        files = self._files = open_files(where, assembly.step(), assembly.state_shapes())
        self.supervision.resources.callback(files.close)
        return dataclasses.replace(assembly, update=UpdateFromFiles(files=files))

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
