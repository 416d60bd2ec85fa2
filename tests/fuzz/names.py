# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws strings for flags and launch files: taken as one word, or refused in one sentence.

A launch file has as many lines with a value as without, and its shell parses. A flag that is taken
holds the string; a message has no control character.

To add a character: ALPHABET of `tests/fuzz/names.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import operator
import pathlib
import subprocess

import numpy as np

from experiments.cli.flags import parse_flags
from experiments.launch.config import CLUSTERS, LaunchConfig, LaunchRunConfig
from jaxmoe.configs import from_json, to_json
from jaxmoe.run.config import PretrainConfig
from tests.fuzz.outcome import Outcome, is_likely, pick, sentence

ALPHABET = (
    "a",
    "b",
    "7",
    "-",
    "_",
    ".",
    "/",
    ":",
    "@",
    " ",
    "'",
    '"',
    "$(x)",
    "`x`",
    "\\",
    "*",
    "#",
    "\n",
    "\r",
    "\t",
    "\x00",
    "\x1b[2J",
    "\x7f",
    "\x85",
    "\u2028",
    "\u202e",
    "\ud800",
    "{{",
    "|",
)
GIVEN = {
    "slurm": {"nodes": 2},
    "jobset": {"topology": "4x4", "image": "a/b:c", "volume_claim": "runs"},
    "tpu_vm": {"accelerator_type": "v5litepod-16", "zone": "us-central1-a"},
}
COMMAND = "python -m experiments.pretrain --run.directory /runs/x"
FLAGS = ("run.name", "run.directory", "profile.steps", "checkpoint.initial.path", "optimizer")


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Give a string to a field of a launch file, or to a flag."""
    allowed = ALPHABET if is_likely(rng, 0.5) else ALPHABET[:9]
    word = "".join(pick(rng, allowed) for _ in range(rng.integers(1, 8)))
    if is_likely(rng, 0.6):
        return _launch(rng, word, place)
    return _flag(pick(rng, FLAGS), word)


def _launch(rng: np.random.Generator, word: str, place: pathlib.Path) -> Outcome:
    cluster = pick(rng, sorted(CLUSTERS))
    usual = CLUSTERS[cluster](**GIVEN[cluster])
    texts = [
        field.name
        for field in dataclasses.fields(usual)
        if "str" in str(field.type) and field.name != "setup"  # shell text, of any lines
    ]
    field = pick(rng, (*texts, "run.name", "run.directory"))
    name, directory = "job", None
    try:
        before = LaunchConfig(command=COMMAND, cluster=usual)
        if field == "run.name":
            name = word
        elif field == "run.directory":
            directory = word
        else:
            usual = dataclasses.replace(usual, **{field: word})
        run = LaunchRunConfig(name=name, directory=directory)
        config = LaunchConfig(command=COMMAND, cluster=usual, run=run)
    except ValueError as error:
        return Outcome("refused", sentence(error))
    plain, written = (each.cluster.files(each.job).files for each in (before, config))
    for (file, text), (_, other) in zip(written.items(), plain.items(), strict=True):
        more = 1 if field in ("partition", "account", "project", "version") else 0
        lines = len(text.splitlines()) - len(other.splitlines())
        assert 0 <= lines <= 3 * more, f"{field}={word!r} adds {lines} lines to {file}"
        (place / file).write_text(text)
        if text.startswith("#!"):
            parsed = subprocess.run(
                ["/bin/bash", "-n", place / file], capture_output=True, text=True, check=False
            )
            assert parsed.returncode == 0, f"{field}={word!r}: {parsed.stderr}"
    return Outcome("written", f"{cluster}.{field}={word!r}")


def _flag(flag: str, word: str) -> Outcome:
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written), contextlib.redirect_stdout(written):
            config = parse_flags(PretrainConfig(), [f"--{flag}={word}"], "pretrain", "Trains.")
    except SystemExit as exit_:
        text = written.getvalue()
        assert exit_.code == 2, f"--{flag}={word!r} ends with {exit_.code}: {text}"
        raw = [c for c in text if not c.isprintable() and c != "\n"]
        assert not raw, f"--{flag}={word!r}: the message has {raw}"
        return Outcome("refused", text.strip().replace("\n", " / "))
    found = operator.attrgetter(flag)(config) if "." in flag else None
    assert found == word, f"--{flag}={word!r} is read as {found!r}"
    assert from_json(PretrainConfig, to_json(config)) == config
    return Outcome("taken", f"--{flag}={word!r}")
