# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that the hosts read all parts of a batch once, and the same data.

A part that two hosts read and another that no host reads still make a batch of the right shape.
Before compiling, the hosts therefore exchange their part, the number of parts, and a hash of the
loader's fingerprint.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.loader import Loader
from pallas_kernels.array_types import Int
from sharding.distributed import gather


def check_hosts(loader: Loader, *, process_index: int, process_count: int) -> None:
    """Raise unless the hosts together read the batches of one loader; each host must call this.

    Args:
        loader: Loader of this host.
        process_index: Part that this host reads.
        process_count: Number of parts.

    Raises:
        DataError: A part is read more often than another, or not at all, or the hosts read
            different data; raised on every host.
    """
    digest = hashlib.sha256(json.dumps(loader.fingerprint(), sort_keys=True).encode()).digest()
    claim = [process_index, process_count, *np.frombuffer(digest[:8], "<i4").tolist()]
    check_claims(gather(np.array(claim, np.int32)))


def check_claims(claims: Int[np.ndarray, "hosts 4"]) -> None:
    """Raise unless the claims of all hosts are consistent.

    Args:
        claims: Part, number of parts, and two words of the hash, for each host.

    Raises:
        DataError: The claims are not consistent.
    """
    parts, counts = claims[:, 0], claims[:, 1]
    if len(set(counts.tolist())) > 1:
        raise DataError(
            f"the hosts cut batches into different numbers of parts: {counts.tolist()} on hosts 0 "
            f"to {len(claims) - 1}. Give all the same process_count"
        )
    readers = np.bincount(parts, minlength=counts[0])
    if len(set(readers.tolist())) > 1:
        shared = int(np.argmax(readers))
        raise DataError(
            f"hosts {np.flatnonzero(parts == shared).tolist()} all read part {shared} of every "
            f"batch, and part {int(np.argmin(readers))} of {counts[0]} is read by "
            f"{readers.min()}: give each host its own process_index"
        )
    differing = np.flatnonzero((claims[:, 2:] != claims[0, 2:]).any(axis=1))
    if len(differing):
        raise DataError(
            f"host {differing[0]} reads other data than host 0 (their files, seed, batch size, "
            "length or tokenizer differ): copy the same files to all, or read them from one place"
        )
