# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every part of a batch is read by a host, and all hosts read the same data.

Nothing else would notice: a part that two hosts read and another that none reads make a batch of
the right shape. So the hosts tell each other, before anything is compiled, which part they read of
how many, and a hash of what decides every batch (the loader's fingerprint).
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
    """Refuses hosts that do not make up the batches of one loader; each host must call this.

    Args:
        loader: Of this host.
        process_index: The part that this host reads.
        process_count: Number of parts.

    Raises:
        DataError: On every host, if one part is read more often than another, or by none, or if
            the hosts read different data.
    """
    digest = hashlib.sha256(json.dumps(loader.fingerprint(), sort_keys=True).encode()).digest()
    claim = [process_index, process_count, *np.frombuffer(digest[:8], "<i4").tolist()]
    check_claims(gather(np.array(claim, np.int32)))


def check_claims(claims: Int[np.ndarray, "hosts 4"]) -> None:
    """The check itself.

    Args:
        claims: For each host: part, number of parts, and two words of the hash.

    Raises:
        DataError: They do not fit together.
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
