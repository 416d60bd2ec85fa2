# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: recipes, fields, unions, tuples, and what is said of mistakes."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest

from experiments.cli.flags import ExitCode, exit_on_bad_configuration, fail, parse, parse_flags
from experiments.cli.help import help_page
from jaxmoe import catalog
from jaxmoe.run.config import PretrainConfig
from jaxmoe.tracking import MissingPackageError
from jaxmoe.training.guard import GuardConfig
from tests.support.small_configs import (
    Balance,
    Bias,
    Model,
    MoE,
    Run,
    Sigmoid,
    Softmax,
    config,
)


def tiny():
    """A small model.

    More about it.
    """
    return Run()


def late_softmax():
    """Another start."""
    router = Softmax(order="after")
    return Run(model=Model(moe=MoE(router=router, balancers=(Balance(coefficient=0.7),))))


RECIPES = {"tiny": tiny, "late_softmax": late_softmax}


def run(*argv):
    return parse(RECIPES, "tiny", argv, "jaxmoe pretrain", "Trains a model.")


def moe(*argv):
    return run(*argv)[1].model.moe


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def refused(capsys, *argv):
    """What is written to stderr when a command line is refused."""
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert "Traceback" not in output.err and not output.out
    assert len(output.err.splitlines()) <= 24  # one screen
    return output.err


def test_no_arguments_run_the_default_recipe():
    assert run() == ("tiny", Run())


def test_the_recipe_comes_first():
    assert run("late_softmax") == ("late_softmax", late_softmax())
    assert run("late-softmax", "--learning_rate", "7") == (
        "late_softmax",
        dataclasses.replace(late_softmax(), learning_rate=7.0),
    )


@pytest.mark.parametrize("flag", ["--model.moe.top_k", "--model.moe.top-k"])
def test_fields_in_both_spellings(flag):
    assert moe(flag, "1") == MoE(top_k=1)
    assert moe(f"{flag}=1") == MoE(top_k=1)


def test_fields_of_every_kind():
    _, given = run("--model.layers", "0", "2", "--model.window", "16", "--model.is_tied", "False")
    assert given.model == Model(layers=(0, 2), window=16, is_tied=False)
    assert run("--model.window", "None")[1] == Run()


def test_members_by_their_name_in_the_registry_with_flags_anywhere():
    expected = MoE(router=Sigmoid(groups=4), top_k=1)
    for name in ("sigmoid_topk", "sigmoid-topk"):
        choice = f"model.moe.router:{name}"
        groups = ("--model.moe.router.groups", "4")
        assert moe(choice, *groups, "--model.moe.top_k", "1") == expected
        assert moe("--model.moe.top_k", "1", choice, *groups) == expected


def test_members_as_values_of_a_flag():
    expected = MoE(router=Sigmoid(groups=4), top_k=1)
    rest = ("--model.moe.router.groups", "4", "--model.moe.top_k", "1")
    assert moe("--model.moe.router", "sigmoid-topk", *rest) == expected
    assert moe(*rest, "--model.moe.router=sigmoid_topk") == expected
    assert run("--model.moe", "none")[1].model == Model(moe=None)


def test_the_default_member_need_not_be_named():
    assert moe("--model.moe.router.order", "after") == MoE(router=Softmax(order="after"))


def test_naming_the_member_of_the_recipe_keeps_its_values():
    given = moe("late_softmax", "model.moe.router:softmax")
    assert given == late_softmax().model.moe


def test_the_only_member_may_be_named():
    assert moe("model.moe.gate:sqrt", "--model.moe.top_k", "1") == MoE(top_k=1)


def test_choice_after_a_flag_of_several_values():
    given = run("--model.layers", "0", "2", "model.moe.router:sigmoid_topk")[1].model
    assert given == Model(layers=(0, 2), moe=MoE(router=Sigmoid()))


def test_field_of_one_member_chooses_it_also_in_a_tuple():
    assert moe("--model.moe.router.groups", "2") == MoE(router=Sigmoid(groups=2))
    assert moe("--model.moe.balancers.0.rate", "2").balancers == (Bias(rate=2.0),)


def test_none_is_a_choice():
    assert run("model.moe:none")[1].model == Model(moe=None)


def test_fields_of_tuple_items():
    given = moe("--model.moe.balancers.0.coefficient", "0.2")
    assert given.balancers == (Balance(coefficient=0.2),)
    assert moe("model.moe.balancers.0:expert_bias").balancers == (Bias(),)


def test_tuples_by_name():
    flag = "--model.moe.balancers"
    assert moe(flag, "expert-bias").balancers == (Bias(),)
    assert moe(flag, "--name", "x").balancers == ()
    assert moe(flag).balancers == ()
    given = moe(flag, "expert_bias", "--model.moe.balancers.0.rate", "0.5")
    assert given.balancers == (Bias(rate=0.5),)


def test_tuples_keep_the_items_of_the_recipe_and_are_judged_with_everything_else():
    # Two balancers are an error until the router is read: it comes later on the line.
    given = moe(
        "late_softmax",
        "--model.moe.balancers",
        "expert_bias",
        "balance",
        "model.moe.router:sigmoid_topk",
    )
    assert given.balancers == (Bias(), Balance(coefficient=0.7))


def test_help_shows_recipes_fields_and_registry_names(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for line in (
        "  tiny  A small model.",
        "  late_softmax  Another start.",
        "  model.moe.router:softmax | sigmoid_topk",
        "  model.moe.gate:sqrt",
        "  --model.moe.balancers balance | expert_bias",
        "  model.moe:moe | none",
        "  --model.moe.top_k INT\n        Experts per token. (default: 2)",
        "model.moe.router: Softmax, then the largest. (softmax)",
        "  --model.layers INT ...",
        "  --model.window INT|None",
    ):
        assert line in text


def test_help_of_a_group_follows_the_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--model.moe.router", "sigmoid_topk", "--help", "model.moe.router")
    assert stop.value.code == 0
    assert capsys.readouterr().out == (
        "model.moe.router: Sigmoid scores. (sigmoid_topk)\n"
        "  --model.moe.router.groups INT\n"
        "        Groups of experts. (default: 1)\n\n"
        "Choices, as dotted.field:NAME or --dotted.field NAME (of a tuple: --dotted.field NAME"
        " ...); a flag\nthat only one NAME has chooses it:\n"
        "  model.moe.router:softmax | sigmoid_topk\n"
    )
    assert "did you mean 'model.moe.router'?" in refused(capsys, "--help", "model.moe.ruter")


def parts(*argv):
    recipes = {"default": PretrainConfig}
    return parse(recipes, "default", argv, "jaxmoe pretrain", "Trains.")[1].parts


def test_a_flag_of_a_part_adds_it():
    """And `--parts` chooses parts with their defaults, wherever it stands."""
    snapshots = catalog.choice("run_part", "snapshots")
    limit = catalog.choice("run_part", "time_limit")
    assert parts("--snapshots.every", "3", "--time-limit.minutes=5") == (
        snapshots(every=3),
        limit(minutes=5.0),
    )
    words = ("--snapshots.every", "3", "--parts", "time_limit", "snapshots")
    assert parts(*words) == (limit(), snapshots(every=3))
    assert parts("--parts.0.minutes", "5", "--parts", "time_limit") == (limit(minutes=5.0),)


def test_a_flag_that_moved_to_a_part_is_answered_with_the_new_one(capsys):
    with pytest.raises(SystemExit) as stop:
        parts("--checkpoint.snapshot_every", "3")
    assert stop.value.code == 2
    said = "there is no flag --checkpoint.snapshot_every: it is --snapshots.every now"
    assert said in capsys.readouterr().err


def test_a_value_for_a_group_that_is_off_is_answered_with_its_first_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        parts("--checkpoint.initial", "runs/base")
    assert stop.value.code == 2
    said = "--checkpoint.initial is a group of flags: did you mean --checkpoint.initial.path"
    assert f"{said} runs/base?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parts("--data.partition", "3/8")
    said = "--data.partition is a group of flags: did you mean --data.partition.part 3/8?"
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parts("--checkpoint.initial.step", "8")
    assert "checkpoint.initial.path is missing" in capsys.readouterr().err


def test_help_of_a_part_has_the_flags_that_add_it():
    page = help_page(PretrainConfig(), "snapshots", "prog", "A command.")
    assert page.startswith("snapshots: Keeps the state in host memory, with parity")
    assert "  --snapshots.every INT\n        Steps between snapshots. (default: 10)" in page


def test_groups_that_are_off_are_listed_together():
    page = help_page(PretrainConfig(), "", "prog", "A command.")
    _, listed = page.split("Groups that are off until a flag of theirs is given")
    assert {"run.lock", "training.guard", "checkpoint.initial"} <= set(listed.split())
    assert "training.guard:guard" not in page and "  model.moe:moe | none" in page
    given = dataclasses.replace(PretrainConfig().training, guard=GuardConfig())
    page = help_page(dataclasses.replace(PretrainConfig(), training=given), "", "prog", "A.")
    assert "training.guard:guard | none" in page


def test_help_of_a_group_that_is_off_has_its_fields():
    page = help_page(PretrainConfig(), "execution.kernels", "prog", "A command.")
    assert PretrainConfig().execution.kernels is None
    assert "  --execution.kernels.attention reference|xla|" in page
    assert "  execution.kernels:kernels | none" in page


@pytest.mark.parametrize("kind", ["optimizer", "parts", "training.average"])
def test_help_of_a_choice_has_a_line_about_each_member(kind):
    """`parts` and `training.average` have none that is chosen, and so no fields."""
    page = help_page(PretrainConfig(), kind, "prog", "A command.")
    names = catalog.names({"parts": "run_part"}.get(kind, kind.rpartition(".")[2]))
    found = re.findall(r"^  (\w+)  +\S", page.partition(f"Members of {kind}:\n")[2], re.MULTILINE)
    assert found == list(names)


def test_unknown_recipe(capsys):
    assert refused(capsys, "tinny") == (
        "error: unknown recipe 'tinny': did you mean 'tiny'?\nrecipes: tiny, late_softmax\n"
    )


def test_unknown_member(capsys):
    assert refused(capsys, "model.moe.router:sigmod_topk") == (
        "error: model.moe.router: has no 'sigmod_topk': did you mean 'sigmoid_topk'?\n"
        "choices: softmax, sigmoid_topk\n"
    )
    for words in (("--model.moe.router", "sigmod"), ("--model.moe.router=sigmod",)):
        assert "did you mean 'sigmoid_topk'?" in refused(capsys, *words)
    for words in (("--model.moe.router",), ("--model.moe.router", "--learning_rate", "1")):
        assert refused(capsys, *words) == (
            "error: --model.moe.router needs a name\nchoices: softmax, sigmoid_topk\n"
        )
    assert "did you mean 'sqrt'?" in refused(capsys, "model.moe.gate:sqr")
    assert "did you mean 'expert_bias'?" in refused(capsys, "--model.moe.balancers", "expert_bais")


def test_unknown_field(capsys):
    assert refused(capsys, "--model.moe.topk", "3") == (
        "error: there is no flag --model.moe.topk: did you mean --model.moe.top_k?\n"
    )
    assert refused(capsys, "--zzz", "3") == (
        "error: there is no flag --zzz: jaxmoe pretrain --help-all lists all of them\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr 1", "there is no flag --lr: did you mean --learning_rate?"),
        ("--experts 4", "there is no flag --experts: did you mean --model.moe.num_experts?"),
        ("--model.moe:none", "there is no flag --model.moe:none: did you mean --model.moe none?"),
        ("--top-k 4", "there is no flag --top-k: did you mean --model.moe.top_k?"),
        (
            "--recipe tiny",
            "there is no flag --recipe: a recipe is the first word: prog tiny",
        ),
        (
            "--learning_rate 1 late-softmax",
            "'late-softmax' is a recipe, which is the first word: prog late_softmax [flags]",
        ),
        ("--name a b", "unexpected word 'b': a field is --dotted.field value, see prog --help"),
        ("model.moe.ruter:softmax", "there is no choice model.moe.ruter: did you mean"),
        ("learning_rate=1", "'learning_rate=1' is not a flag: did you mean --learning_rate 1?"),
        ("--learning_rate 1 top_k=1", "'top_k=1' is not a flag: did you mean --model.moe.top_k 1?"),
    ],
)
def test_common_mistakes_are_answered_with_the_right_spelling_in_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        parse(RECIPES, "tiny", words.split(), "prog", "Trains a model.")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_the_last_of_a_repeated_flag_counts():
    words = ("--model.moe.top_k", "1", "model.moe.gate:sqrt", "--model.moe.top-k", "3")
    assert run(*words)[1].model.moe.top_k == 3


def test_a_value_of_the_wrong_type(capsys):
    assert "--model.moe.top_k: invalid literal for int()" in refused(
        capsys, "--model.moe.top_k", "two"
    )


def test_what_a_config_refuses_comes_with_its_path(capsys):
    text = refused(capsys, "--model.moe.top_k", "9")
    assert text == "error: model.moe: moe.top_k=9 must not exceed moe.num_experts=8\n"
    text = refused(capsys, "--model.moe.router.groups", "0")
    assert "error: model.moe.router: router.groups=0 must be at least 1" in text


def test_commands_without_recipes():
    @config
    class Evaluate:
        directory: str = "runs/pretrain/tiny"

    given = parse_flags(Evaluate(), ["--directory", "x"], "jaxmoe evaluate", "E.")
    assert given == Evaluate(directory="x")


@pytest.mark.parametrize("error", [ValueError("batch=6"), MissingPackageError("no tyro")])
def test_bad_configurations_end_with_one_line(capsys, error):
    with pytest.raises(SystemExit) as stop, exit_on_bad_configuration():
        raise error
    assert stop.value.code == ExitCode.BAD_CONFIGURATION == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_control_characters_of_an_error_are_escaped(capsys):
    with pytest.raises(SystemExit):
        fail("a\x1b[2J\ud800\u202e\tb\nsecond line")
    assert capsys.readouterr().err == "error: a\\x1b[2J\\ud800\\u202e\\tb\nsecond line\n"


def test_other_errors_are_not_hidden():
    with pytest.raises(KeyError), exit_on_bad_configuration():
        raise KeyError("a bug")


def test_a_recipe_that_is_refused(capsys):
    def wrong():
        return Run(model=Model(moe=MoE(top_k=9)))

    with pytest.raises(SystemExit) as stop:
        parse({"wrong": wrong}, "wrong", [], "prog", "d")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: moe.top_k=9 must not exceed")


def test_exit_codes_are_those_of_the_contract():
    assert [(code.name, code.value) for code in ExitCode] == [
        ("DONE", 0),
        ("BAD_CONFIGURATION", 2),
        ("DIVERGED", 3),
        ("DAMAGED", 65),
        ("LOST", 69),
        ("NOT_SAVED", 74),
        ("PREEMPTED", 75),
        ("CORRUPTED", 76),
        ("TAKEN_OVER", 77),
        ("HUNG", 124),
        ("INTERRUPTED", 130),
    ]
    with pytest.raises(SystemExit) as stop:
        fail("x")
    assert type(stop.value.code) is int


def test_without_tyro_the_way_out_is_named():
    script = (
        "import sys; sys.modules['tyro'] = None\n"
        "import dataclasses\n"
        "from experiments.cli.flags import parse_flags\n"
        "C = dataclasses.make_dataclass('C', [('x', int, 1)])\n"
        "parse_flags(C(), [], 'p', 'd')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: tyro is not installed: pip install 'jaxmoe[train]'\n"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ("--model.moe.top_k", "abc"),
            "--model.moe.top_k: invalid literal for int() with base 10: 'abc'",
        ),
        (
            ("--model.moe.top_k",),
            "Missing value for argument '--model.moe.top_k'. Expected 1 values.",
        ),
        (
            ("--model.moe.router.order", "bf"),
            "invalid choice 'bf' for argument '--model.moe.router.order'."
            " Expected one of ('before', 'after').",
        ),
    ],
    ids=["value", "none", "choice"],
)
@pytest.mark.parametrize("frame", ["hyphens", "boxes"])
def test_a_wrong_value_is_answered_in_one_line(words, wanted, frame, capsys, monkeypatch):
    # tyro draws boxes where standard output is UTF-8.
    monkeypatch.setattr("tyro._fmtlib._should_use_utf8_drawing_chars", lambda: frame == "boxes")
    assert refused(capsys, *words) == f"error: {wanted}\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_process_answers_a_wrong_value_in_one_line(encoding):
    result = subprocess.run(
        [sys.executable, "-m", "experiments.pretrain", "--training.steps", "many"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    wanted = "error: --training.steps: invalid literal for int() with base 10: 'many'\n"
    assert (result.returncode, result.stderr) == (2, wanted)
