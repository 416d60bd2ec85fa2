# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the centroids of the partition of the data in the run directory, to route texts by them."""

from __future__ import annotations

from jaxmoe.data import Source
from jaxmoe.data.partition import Partition
from jaxmoe.disk import replace_file
from jaxmoe.run.directory import RunDirectory


def partition_of(source: Source) -> Partition | None:
    """Return the part of the documents that a source trains on; None: all of them."""
    return getattr(source, "partition", None)


def keep_partition(directory: RunDirectory, source: Source) -> None:
    """Write the centroids of a run's data, if its documents are partitioned.

    Args:
        directory: Run directory, held by this process.
        source: Data of the run.

    Raises:
        ValueError: The directory cannot be written.
    """
    partition = partition_of(source)
    if partition is not None and not directory.partition_file.exists():
        with directory.usable():
            replace_file(directory.partition_file, partition.clusters.to_bytes())
