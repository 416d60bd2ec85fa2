# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that begins with another's parameters; the refusals name the way."""

import json

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from tests.support.runs import flags, saved_leaves


def _params(directory, step):
    return {k: v for k, v in saved_leaves(directory, step).items() if k.startswith("['params']")}


@pytest.mark.slow
def test_another_optimizer_takes_the_parameters(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    quiet = ("--tracking.sample_length", "0", "--evaluation.every", "0")
    assert pretrain.main(flags(first, 3, *quiet)) == ExitCode.DONE
    capsys.readouterr()

    other = (*quiet, "--optimizer.beta1", "0.8")
    with pytest.raises(SystemExit) as stopped:
        pretrain.main(flags(first, 3, *other))
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    text = " ".join("".join(capsys.readouterr()).split())
    assert (
        "optimizer.beta1" in text and f"begin there with --checkpoint.initial.path {first}" in text
    )

    # A rate of nothing shows what the run began with.
    still = (*other, "--optimizer.learning_rate", "1e-30", "--checkpoint.initial.path", str(first))
    assert pretrain.main(flags(second, 3, *still)) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert (
        f"initial  parameters from {first}/checkpoints step 3; optimizer state (adamw: " in printed
    )
    expected, found = _params(first, 3), _params(second, 3)
    assert expected.keys() == found.keys() and expected
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    assert json.loads((second / "summary.json").read_text())["steps"] == 3

    assert pretrain.main(flags(second, 3, *still)) == ExitCode.DONE
    assert (
        f"checkpoint.initial.path={first} is ignored: the run continues" in capsys.readouterr().out
    )
