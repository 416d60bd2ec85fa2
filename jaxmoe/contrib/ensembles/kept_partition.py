# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the centroids of the partition of the data in the run directory, to route texts by them."""

from __future__ import annotations

import jax

from jaxmoe.contrib.ensembles.partition import Partition
from jaxmoe.data import Source
from jaxmoe.disk import replace_file
from jaxmoe.run.parts import ConfiguredPart
from jaxmoe.run.restore import StartingPoint


def partition_of(source: Source) -> Partition | None:
    """Return the part of the documents that a source trains on; None: all of them."""
    return getattr(source, "partition", None)


class KeptPartition(ConfiguredPart):
    """Writes the centroids of a run's data."""

    def record(self, start: StartingPoint) -> None:
        """Write the centroids, unless they are there.

        Raises:
            ValueError: The directory cannot be written.
        """
        directory = self.directory
        partition = partition_of(start.assembly.source)
        if jax.process_index() != 0 or partition is None or directory.partition_file.exists():
            return
        with directory.usable():
            replace_file(directory.partition_file, partition.clusters.to_bytes())
