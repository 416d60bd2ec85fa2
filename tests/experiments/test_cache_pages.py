# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`--cache_pages` of evaluate and generate: both losses, the bytes, and what is refused."""

import re

import pytest

from experiments import evaluate
from experiments.cli.flags import ExitCode, parse_flags
from experiments.evaluate import EvaluateConfig, part_of_cache
from sharding.sequence_parallel import WHOLE_CACHE, PageSelectionConfig


def selection(*words):
    config = parse_flags(EvaluateConfig(), list(words), "jaxmoe evaluate", "E.")
    return part_of_cache(config.reading, config.cache_pages)


def test_cache_pages_is_the_short_form_of_a_selection():
    assert selection() == WHOLE_CACHE
    assert selection("--cache_pages", "16") == PageSelectionConfig(kept=16)
    wanted = PageSelectionConfig(kept=3, size=8, score="mean")
    short = ("--cache_pages", "3", "--reading.size", "8", "--reading.score", "mean")
    assert (
        selection(*short) == selection("reading:pages", "--reading.kept", "3", *short[2:]) == wanted
    )


def test_fewer_than_no_pages_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        evaluate.main(["--cache_pages", "-1"])
    assert end.value.code == ExitCode.BAD_CONFIGURATION
    assert "reading.kept=-1 must be at least 0" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluate_prints_the_loss_with_and_without_pages(finished, capsys):
    given = ["--run.directory", str(finished), "--reading.size", "2", "--reading.first", "0"]
    assert evaluate.main([*given, "--reading.latest", "1", "--cache_pages", "1"]) == ExitCode.DONE
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(
        r"reading=pages pages=2 of 8 page_size=2 bytes_read=(\d+) of (\d+) decoded_tokens=128"
        r" selected/bits_per_token=(\S+) whole/bits_per_token=(\S+)",
        line,
    )
    assert found, line
    assert int(found[1]) < int(found[2]) and found[3] != found[4]
