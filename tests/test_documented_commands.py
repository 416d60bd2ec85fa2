# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every command line of the pages: it runs as it stands, or what it names is there.

Behind a command come flags that make it small (`tests/support/documented.py`). The lines of the
guides and of the README's walk run in tests of their own, and are not run twice.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib

import pytest

from experiments.bench.__main__ import BENCHES
from experiments.cli import flags as cli
from experiments.recipes import RECIPES
from tests.experiments.test_readme_walk import commands as walk
from tests.support import features
from tests.support.documented import run_all, shell_lines
from tests.support.source_tree import PACKAGES, ROOT
from tests.test_documentation import commands, flag_pages  # noqa: F401  (a fixture)

EXTENDING = ".docs/concepts/extending.md"
"""Its lines need the package that it shows: `tests/experiments/test_extending.py`."""
MEASUREMENTS = "experiments/README.md"
"""Its lines say how a number came about: minutes each, on machines that are named there."""
DOCS = sorted((ROOT / ".docs").glob("*.md")) + sorted((ROOT / ".docs" / "concepts").glob("*.md"))
READMES = [page for package in PACKAGES for page in sorted((ROOT / package).rglob("README.md"))]
LINES = {
    str(page.relative_to(ROOT)): shell_lines(page.read_text(encoding="utf-8"))
    for page in (ROOT / "README.md", *DOCS, *READMES)
}
WALK = [shlex.join(words) for words in walk()]


def runs(line: str, page: str) -> bool:
    """Whether a line is run by the tests of this file."""
    words = shlex.split(line, comments=True)
    if page in (MEASUREMENTS, EXTENDING) or "bench" in words[:2] or shlex.join(words) in WALK:
        return False
    return words[0] in ("jaxmoe", "curl") or words[0].startswith("XLA_FLAGS=")


def groups() -> dict[str, list[tuple[str, str]]]:
    """The lines that are run, with their pages, in groups that take minutes each."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page, lines in LINES.items():
        places = (".docs/concepts", "jaxmoe/contrib", "jaxmoe")
        name = next((place for place in places if page.startswith(place)), "others")
        found.setdefault(name, []).extend((page, line) for line in lines if runs(line, page))
    return found


GROUPS = groups()


def test_each_command_line_of_a_page_is_run_or_names_what_is_there(flag_pages):  # noqa: F811
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = {*settings["project"]["optional-dependencies"]}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    count, faults = 0, []
    for page, lines in LINES.items():
        for line in lines:
            words = shlex.split(line, comments=True)
            elsewhere = page in (MEASUREMENTS, EXTENDING) or shlex.join(words) in WALK
            if elsewhere or runs(line, page):
                continue
            count += 1
            if words[0] == "make":
                right = {*words[1:]} <= {*targets}
            elif words[:2] == ["pip", "install"]:
                named = re.search(r"\[(.+)\]", words[-1])
                right = named is not None and {*named[1].split(",")} <= extras
            elif words[0] == "jaxmoe" and words[1] == "bench":
                recipes = {name: bench.recipe for name, bench in BENCHES.items()}
                flags = [word.strip("[]") for word in words[2:]]
                right = bool(cli.parse(recipes, "step", flags, "jaxmoe bench", ""))
            elif "pytest" in words:
                paths = [word for word in words if word.startswith("tests/")]
                right = all((ROOT / path).exists() for path in paths)
            else:
                right = line.split("#")[0].strip() in OTHERS
            faults += [] if right else [f"{page}: {line}"]
    assert count > 20 and not faults, "\n".join(faults)
    named = re.findall(r"--([a-z][\w.]+)", " ".join(LINES[MEASUREMENTS]))
    known = set(re.findall(r"`--([\w.]+)`", "".join(flag_pages.values())))
    assert not {*named} - known, {*named} - known


OTHERS = (
    "cd jaxmoe",
    "source .venv/bin/activate",
    # The wheels of a machine without an index; the proofs of an accelerator from them.
    "python -m pip install --no-index --no-deps --target site wheels/*.whl",
    "PYTHONPATH=$PWD:$PWD/site jaxmoe bench accelerator --minutes 15",
)
"""Lines that concern the reader's machine."""


def test_lines_that_run_name_commands_that_exist():
    named = {
        (shlex.split(line)[1], page)
        for lines in GROUPS.values()
        for page, line in lines
        if line.startswith("jaxmoe ")
    }
    assert len(named) > 50 and not [each for each in named if each[0] not in commands()]


def test_lines_that_run_name_recipes_that_exist():
    named = []
    for page, line in itertools.chain.from_iterable(GROUPS.values()):
        words = shlex.split(line, comments=True)
        if len(words) > 2 and words[1] in ("pretrain", "plan", "describe", "levels"):
            named += [(words[2], page)] if re.fullmatch(r"\w+", words[2]) else []
    unknown = [each for each in named if each[0] not in {*RECIPES, "resume", "branch"}]
    assert len(named) > 20 and not unknown


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.large
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("group", GROUPS)
def test_the_command_lines_of_pages_run_as_they_stand(group, tmp_path):
    lines = GROUPS[group]
    asked = [[line, *further(line, number)] for number, (_, line) in enumerate(lines)]
    faults = [
        f"{page}: {line}\n  exit code {ended.code}\n{ended.text[-1500:]}"
        for (page, line), ended in zip(lines, run_all(tmp_path, asked), strict=True)
        if ended.code
    ]
    assert len(lines) > 10 and not faults, "\n".join(faults)


def further(line: str, number: int) -> tuple[str, ...]:
    """A place for the run of a line that names none: the one of the demo is there already.

    Loops need their layers, workers their rows.
    """
    words = shlex.split(line, comments=True)
    named = {"--run.directory", "--run.name", "resume", "branch", "--help"} & {*words}
    makes_run = words[:2] in (["jaxmoe", "pretrain"], ["jaxmoe", "finetune"], ["jaxmoe", "rl"])
    place: tuple[str, ...] = ()
    if makes_run and not named:
        place += ("--run.directory", f"runs/lines/{number}")
    if "--model.loop.last" in words:
        place += ("--model.num_layers", "4")
    if "--replicas.workers" in words:
        place += ("--training.batch_size", "32")
    return place


def test_the_rows_of_features_were_run_until_the_day_that_their_page_names():
    record = json.loads(features.RECORD.read_text(encoding="utf-8"))
    rows = features.rows()
    assert record and {*record} <= {*rows}
    changed = [name for name, row in record.items() if row["commands"] != rows[name]]
    assert not changed, f"run python -m tests.support.features --record: {changed}"
    days = {row["date"] for row in record.values()}
    text = " ".join(features.PAGE.read_text(encoding="utf-8").split())
    assert f"of {len(record)} rows were run until {max(days)}" in text


def test_a_run_without_the_choices_of_its_row_is_found():
    config = {"model": {"moe": {"router": {"kind": "softmax_topk"}, "top_k": 2}}, "steps": [1, 2]}
    config |= {"rate": 30.0, "parts": [{"kind": "snapshots", "every": 10}]}
    command = "jaxmoe pretrain model.moe.router:sigmoid_topk --model.moe.top_k 2 --steps 1 3"
    command += " --rate 30 --snapshots.every 10 --links.every 10"
    assert features.unmet(command, config) == [
        "model.moe.router:sigmoid_topk is softmax_topk",
        "--steps 3 is [1, 2]",
        "--links.every 10 is [None]",
    ]
