# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The environment of a site: what is written is read, what is wrong is named."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxmoe.contrib.slow_links.sites.config import (
    KEY_VARIABLE,
    VARIABLE,
    SiteConfig,
    connect,
    key_of,
)
from jaxmoe.contrib.slow_links.sites.coordinator import Coordinator
from tests.support.sites import SIZES, Board, BoardTransport

paths = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.sampled_from(["tcp://[::1]:80", "tcp://node0:8477"]) | paths.map("directory:{}".format),
    st.none() | st.integers(1, 4),
    st.floats(1e-3, 1e9),
)
def test_a_config_survives_its_text(transport, quorum, grace):
    config = SiteConfig(member=9, of=4, transport=transport, quorum=quorum, grace=grace)
    assert SiteConfig.from_text(config.to_text()) == config
    assert SiteConfig.from_environment({VARIABLE: config.to_text()}) == config


def test_other_processes_are_no_sites():
    assert SiteConfig.from_environment({}) is None and key_of({}) is None
    assert key_of({KEY_VARIABLE: "secret"}) == b"secret"


def test_the_default_quorum_is_more_than_half():
    quorums = [
        SiteConfig(member=0, of=of, transport="directory:x").rules.quorum for of in range(1, 7)
    ]
    assert quorums == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("member=0 of=0", "site of=0 must be from 1 to 4096"),
        ("member=-1 of=2", "site member=-1 must be from 0 to 4095"),
        ("member=0 of=2 quorum=3", "site quorum=3 must be from 1 to of=2"),
        ("member=0 of=2 grace=0", "site grace=0.0 must be more than 0 s"),
        ("member=0 of=2 grace=nan", "site grace=nan must be more than 0 s"),
        ("member=x of=2", "JAXMOE_ISLAND has 'member=x': its fields are member, of, transport,"),
        ("member=0 size=2", "JAXMOE_ISLAND has 'size=2': its fields are member, of, transport,"),
        ("of=2", "lacks member"),
        ("member=0 of=2 transport=ftp://x", "site transport=ftp://x must be tcp://host:port or"),
        ("member=0 of=2 transport=tcp://x", "sites address=x is not host:port"),
        ("member=0 of=2 transport=directory:", "site transport=directory: must be"),
    ],
)
def test_bad_input(text, message):
    with pytest.raises(ValueError) as refused:
        SiteConfig.from_text(text if "transport" in text else f"{text} transport=directory:x")
    assert message in str(refused.value)


def test_connect_goes_where_the_config_says(tmp_path, monkeypatch):
    """By TCP with the key of the environment, by a directory, and by a transport of the caller."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    with Coordinator("127.0.0.1:0", SIZES, key=b"secret") as coordinator:
        for transport in (f"tcp://{coordinator.address}", f"directory:{tmp_path}"):
            config = SiteConfig(member=0, of=1, transport=transport)
            rounds = connect(config, SIZES)
            assert rounds.start() is None
            found = rounds.exchange(b"x")
            assert (found.members, found.payloads, rounds.member) == ((0,), {0: b"x"}, 0)
            assert rounds.agree(b"x").is_same
            rounds.close()
    assert (tmp_path / "rounds").exists()
    board = Board()
    rounds = connect(config, SIZES, transport=BoardTransport(board, 0))
    rounds.start()
    rounds.exchange(b"x")
    assert board.posts
