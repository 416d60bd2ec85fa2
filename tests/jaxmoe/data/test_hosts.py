# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts whose parts do not make up a batch are refused before compiling."""

import numpy as np
import pytest

from jaxmoe.data import DataError, Loader, MarkovConfig, check_hosts, loader


def _claims(*claims):
    return np.array(claims, np.int32)


def _loader(seed=0):
    return Loader(MarkovConfig().build(0), batch_size=4, sequence_length=8, seed=seed)


@pytest.mark.parametrize(
    "claims",
    [
        _claims((0, 1, 7, 7)),
        _claims((0, 2, 7, 7), (1, 2, 7, 7)),
        _claims((0, 2, 7, 7), (1, 2, 7, 7), (1, 2, 7, 7), (0, 2, 7, 7)),  # pairs share sequences
    ],
)
def test_consistent_host_claims_pass(claims):
    loader.check_claims(claims)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (
            _claims((1, 2, 7, 7), (1, 2, 7, 7)),
            r"hosts \[0, 1\] all read part 1 of every batch, and part 0 of 2 is read by 0: give",
        ),
        (
            _claims((0, 1, 7, 7), (0, 2, 7, 7)),
            r"different numbers of parts: \[1, 2\] on hosts 0 to 1",
        ),
        (
            _claims((0, 2, 7, 7), (1, 2, 7, 8)),
            "host 1 reads other data than host 0 .their files, seed, batch size, length or token",
        ),
    ],
)
def test_inconsistent_host_claims_are_refused(claims, message):
    with pytest.raises(DataError, match=message):
        loader.check_claims(claims)


def test_hosts_exchange_part_and_fingerprint(monkeypatch):
    check_hosts(_loader(), process_index=0, process_count=1)
    told = []
    monkeypatch.setattr(loader, "gather", lambda values: told.append(values) or values[None])
    with pytest.raises(DataError, match="part 0 of 2 is read by 0"):
        check_hosts(_loader(), process_index=1, process_count=2)
    for seed in (0, 0, 1):
        check_hosts(_loader(seed), process_index=0, process_count=1)
    np.testing.assert_array_equal(told[1], told[2])
    assert (told[1][2:] != told[3][2:]).any()
