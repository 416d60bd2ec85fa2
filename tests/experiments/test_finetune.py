# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning from the command line: what is saved, resumed, opened, folded and refused."""

import json
import shutil

import jax
import numpy as np
import pytest

from experiments import evaluate, finetune, pretrain
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from jaxmoe import load_checkpoint, save_checkpoint
from jaxmoe.checkpoint.manifest import read_manifest
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import saved_config
from jaxmoe.run.serving import ServedCheckpoint, open_served
from jaxmoe.serve import Sampling
from jaxmoe.serve.sizes import EngineSizesConfig
from tests.support.full_disk import end_on_a_full_disk
from tests.support.runs import finished_flags, logged_losses, saved_leaves

TARGETS = ("--adapter.targets.roles", "attention_in")
ADAPTER = ("adapter:lora", "--adapter.rank", "2", *TARGETS)
OTHERS = {
    "adalora": (
        "--adapter.rank",
        "4",
        "--adapter.target_rank",
        "2",
        "--adapter.initial",
        "0",
        "--adapter.final",
        "3",
        "--adapter.interval",
        "1",
    ),
    "switch_lora": ("--adapter.rank", "2", "--adapter.rate", "0.5", "--adapter.candidates", "4"),
    "mixture_of_shards": ("--adapter.rank", "4"),
}


def flags(base, directory, steps, *more, adapter=ADAPTER):
    where = ("--checkpoint.initial.path", str(base), "--run.directory", str(directory))
    length = ("--training.steps", str(steps), "--schedule.warmup_steps", "1")
    outputs = ("--tracking.sample_length", "0", "--checkpoint.every", "2", "--tracking.trackers")
    return [*where, *adapter, *length, *outputs, *more]


@pytest.fixture(scope="module")
def tuned(finished, tmp_path_factory):
    """A run of 4 steps on top of `finished`, in one go."""
    directory = tmp_path_factory.mktemp("finetune") / "tuned"
    assert finetune.main(flags(finished, directory, 4)) == ExitCode.DONE
    return directory


def test_checkpoints_hold_the_adapter_and_name_its_base(finished, tuned):
    manifest = read_manifest(tuned / "checkpoints" / "4")
    params = {path for path in manifest.arrays if path.startswith("params/")}
    assert params and all(path.endswith((":down", ":up", ":scale")) for path in params)
    assert manifest.base is not None
    assert (manifest.base["path"], manifest.base["step"]) == (str(finished), 6)
    # It stays that step when the base trains on.
    assert saved_config(tuned).checkpoint.initial.step == 6


def test_the_base_is_bitwise_that_of_its_run(finished, tuned):
    _, state, step = load_run(str(tuned), None, needs_data=False)
    base = load_checkpoint(finished / "checkpoints", step=6)["params"]
    assert step == 4
    for path, value in jax.tree_util.tree_flatten_with_path(base)[0]:
        held = state.params
        for key in path:
            held = held[key.key]
        np.testing.assert_array_equal(held, value)


@pytest.mark.slow
def test_adapters_of_a_run_are_served_together_and_alike_alone(finished, tuned, tmp_path):
    """The folded run, the base, and the adapter beside them; another base is refused in words."""
    sizes = EngineSizesConfig(max_sequences=2, pieces=("1x16",), num_logprobs=0)
    asked = (1, 2, 3), Sampling(max_tokens=6, temperature=0.0)

    def tokens(path, adapter="", **given):
        with open_served(ServedCheckpoint(path=str(path), **given), sizes).engine as engine:
            stream = engine.submit(*asked, adapter=adapter)
            return [event.token for event in stream if hasattr(event, "token")]

    served = open_served(
        ServedCheckpoint(path=str(finished), adapters={"one": str(tuned), "two": str(tuned)}), sizes
    )
    assert list(served.models) == [served.name, f"{served.name}:one", f"{served.name}:two"]
    with served.engine as engine:
        streams = [engine.submit(*asked, adapter=name) for name in ("", "one", "two")]
        found = [[e.token for e in stream if hasattr(e, "token")] for stream in streams]
    assert found[0] == tokens(finished) and found[1] == found[2] == tokens(tuned)
    other = shutil.copytree(tuned, tmp_path / "other")
    with pytest.raises(ValueError, match="must be a model without an adapter: name the run that"):
        open_served(ServedCheckpoint(path=str(tuned), adapters={"one": str(other)}), sizes)
    with pytest.raises(ValueError, match="a run without an adapter"):
        open_served(ServedCheckpoint(path=str(finished), adapters={"one": str(finished)}), sizes)
    later = shutil.copytree(finished, tmp_path / "later")
    assert pretrain.main(["resume", str(later), "--training.steps", "7"]) == ExitCode.DONE
    adapters = {"one": str(tuned)}
    with pytest.raises(ValueError, match="trained on step 6 of .* step 7 is served.*run.step 6"):
        open_served(ServedCheckpoint(path=str(later), adapters=adapters), sizes)
    assert found[0] == tokens(later, step=6, adapters=adapters)
    assert found[1] == tokens(later, "one", step=6, adapters=adapters)
    moved = tmp_path / "moved"
    assert pretrain.main([*finished_flags(moved), "--training.seed", "7"]) == ExitCode.DONE
    with pytest.raises(ValueError, match="holds other parameters"):
        open_served(ServedCheckpoint(path=str(moved), adapters={"one": str(tuned)}), sizes)


@pytest.mark.slow
def test_resumed_in_the_middle_it_ends_bitwise_alike(finished, tuned, tmp_path):
    stopped = tmp_path / "stopped"
    assert finetune.main(flags(finished, stopped, 4)) == ExitCode.DONE
    shutil.rmtree(stopped / "checkpoints" / "4")
    assert finetune.main(flags(finished, stopped, 4)) == ExitCode.DONE
    ends = [saved_leaves(directory, 4) for directory in (tuned, stopped)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert logged_losses(stopped) == logged_losses(tuned)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_resume_bitwise_and_fold(name, finished, tmp_path, capsys):
    adapter = (f"adapter:{name}", *OTHERS[name], *TARGETS)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for directory in (whole, stopped):
        assert finetune.main(flags(finished, directory, 4, adapter=adapter)) == ExitCode.DONE
    shutil.rmtree(stopped / "checkpoints" / "4")
    assert finetune.main(flags(finished, stopped, 4, adapter=adapter)) == ExitCode.DONE
    ends = [saved_leaves(directory, 4) for directory in (whole, stopped)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    moves = name == "switch_lora"
    assert (read_manifest(whole / "checkpoints" / "4").base is None) == moves
    check_fold(whole, tmp_path / "folded", capsys)


def test_folded_weights_compute_what_the_adapter_does(tuned, tmp_path, capsys):
    check_fold(tuned, tmp_path / "folded", capsys)


def check_fold(tuned, folded, capsys):
    """Folded weights have the loss of the adapter."""
    convert = ["convert", "--run.directory", str(tuned), "--fold", "True", "--to", str(folded)]
    assert checkpoint.main(convert) == ExitCode.DONE
    capsys.readouterr()
    losses = []
    for directory in (tuned, folded):
        assert evaluate.main(["--run.directory", str(directory)]) == ExitCode.DONE
        line = capsys.readouterr().out.splitlines()[-1]
        losses.append(float(line.partition("eval/bits_per_token=")[2].split()[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert json.loads((folded / "summary.json").read_text())["format"] == "folded"


MEMBERS = {
    "lift": ("--adapter.refresh_every", "3", "--adapter.rank", "1"),
    "quantised_choices": ("--adapter.rank", "2", "--adapter.mean_bits", "2.5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMBERS)
def test_members_resume_evaluate_and_fold(name, finished, tmp_path, capsys):
    whole, stopped, folded = (tmp_path / one for one in ("whole", "stopped", "folded"))
    more = (f"adapter:{name}", *MEMBERS[name], *ADAPTER[3:])
    for directory in (whole, stopped):
        assert finetune.main(flags(finished, directory, 4, adapter=more)) == ExitCode.DONE
    shutil.rmtree(stopped / "checkpoints" / "4")
    assert finetune.main(flags(finished, stopped, 4, adapter=more)) == ExitCode.DONE
    ends = [saved_leaves(directory, 4) for directory in (whole, stopped)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    losses = logged_losses(whole)
    assert logged_losses(stopped) == losses and np.isfinite(list(losses.values())).all()
    convert = ["convert", "--run.directory", str(whole), "--fold", "True", "--to", str(folded)]
    assert checkpoint.main(convert) == ExitCode.DONE
    capsys.readouterr()
    found = []
    for directory in (whole, folded):
        assert evaluate.main(["--run.directory", str(directory)]) == ExitCode.DONE
        line = capsys.readouterr().out.splitlines()[-1]
        found.append(float(line.partition("eval/bits_per_token=")[2].split()[0]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_bits_of_layers_are_for_adapters_that_choose_them(tuned, tmp_path, capsys):
    convert = ["convert", "--run.directory", str(tuned), "--to", str(tmp_path / "small")]
    for more, message in (
        (("--fold", "True", "--fold_bits", "3"), "fold_bits=3 chooses the bits of layers, which"),
        (("--quantise", "w8a8", "--fold_bits", "3"), "--fold_bits changes nothing without --fold"),
    ):
        with pytest.raises(SystemExit):
            checkpoint.main([*convert, *more])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--checkpoint.initial.path is missing"),
        (("--checkpoint.initial.path", "nowhere"), "nowhere"),
        (
            ("--checkpoint.initial.path", "{finished}", "--adapter.rank", "0"),
            "adapter.rank=0 must be",
        ),
        (("--checkpoint.initial.path", "{finished}", "--adapter.rnak", "2"), "adapter.rank?"),
    ],
)
def test_commands_that_cannot_run_say_why(
    words, message, finished, tuned, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where no run is the default
    given = [word.format(tuned=tuned, finished=finished) for word in words]
    with pytest.raises(SystemExit) as ended:
        finetune.main(given)
    assert ended.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err


def test_another_base_is_refused_and_leaves_the_run_bitwise(finished, tuned, tmp_path, capsys):
    other, here = tmp_path / "other", finished / "checkpoints"
    before = {name: (tuned / name).read_bytes() for name in ("config.json", "lineage.json")}
    shutil.copytree(finished, other, ignore=shutil.ignore_patterns("checkpoints"))
    state, manifest = load_checkpoint(here, step=6), read_manifest(here / "6")
    state["params"]["head"]["weight"] = state["params"]["head"]["weight"].at[0, 0].add(1e-3)
    save_checkpoint(
        other / "checkpoints", state, step=6, config=manifest.config, data=manifest.data
    )
    with pytest.raises(SystemExit):
        finetune.main(flags(other, tuned, 4))
    message = capsys.readouterr().err
    assert "holds other parameters: name the model that was adapted" in message
    assert before == {name: (tuned / name).read_bytes() for name in before}


def test_a_base_that_has_moved_is_named(finished, tuned, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(tuned, moved)
    config = json.loads((moved / "config.json").read_text())
    config["checkpoint"]["initial"] |= {"path": str(tmp_path / "gone"), "step": None}
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="gone"):
        load_run(str(moved), None, needs_data=False)
    found, wanted = (
        load_run(*where, needs_data=False, initial=initial)[1]
        for where, initial in (((str(place), 4), str(finished)) for place in (moved, tuned))
    )
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    assert saved_config(moved, str(finished)).checkpoint.initial.step == 6
    with pytest.raises(ValueError, match="has no adapter, its checkpoints hold all parameters"):
        load_run(str(finished), None, needs_data=False, initial=str(tuned))


@pytest.mark.slow
def test_a_full_disk_ends_it_with_the_code_of_a_state_that_is_not_saved(finished, tmp_path):
    code, output = end_on_a_full_disk("experiments.finetune", flags(finished, tmp_path / "run", 4))
    assert code == ExitCode.NOT_SAVED and "the last state could not be saved" in output
    assert "Traceback" not in output
