# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of every page as written, builds the reference and the flag tables, and
checks what the table of features names.

The blocks of a page are one script. The pages run one after the other in one process with 8 CPU
devices and JAX's default settings, each in an empty working directory.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from experiments.cli import flags as cli
from experiments.cli.hints import MODEL_COMMANDS
from experiments.recipes import DEFAULT, RECIPES
from experiments.studies.transfer import config as transfer
from jaxmoe import catalog
from jaxmoe.routing import METHODS
from jaxmoe.run.plan import make_plan
from tests.support.documented import shell_lines
from tests.support.source_tree import PACKAGES, ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUNNER = """
import json, os, sys, tempfile, traceback
failed = {}
for page, source in json.loads(sys.stdin.read()):
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            exec(compile(source, page, "exec"), {"__name__": "__main__"})
        except BaseException:
            failed[page] = traceback.format_exc()
        os.chdir("/")
print(json.dumps(failed), file=sys.stderr)
"""


def scripts() -> dict[str, str]:
    """Return the Python blocks of each page, with lines numbered as in the page."""
    pages = [ROOT / "README.md", *sorted((ROOT / ".docs").glob("*.md"))]
    for folder in ("guides", "concepts"):
        pages += sorted((ROOT / ".docs" / folder).glob("*.md"))
    pages += sorted(path for package in PACKAGES for path in (ROOT / package).rglob("README.md"))
    found = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        lines = [""] * (text.count("\n") + 1)
        for block in BLOCK.finditer(text):
            first = text[: block.start(1)].count("\n")
            for number, line in enumerate(block[1].splitlines()):
                lines[first + number] = line
        if any(lines):
            found[str(page.relative_to(ROOT))] = "\n".join(lines)
    return found


SCRIPTS = scripts()
FIRST = ["README.md", ".docs/tutorial.md"]


def _run(pages: list[str]) -> dict[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    }
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([(page, SCRIPTS[page]) for page in pages]),
        capture_output=True,
        text=True,
        env=environment,
        timeout=800,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.trains
def test_examples_of_the_readme_and_the_tutorial_run_as_written():
    failed = _run([page for page in FIRST if page in SCRIPTS])
    assert not failed, "\n".join(failed.values())


@pytest.mark.slow
@pytest.mark.trains
def test_examples_of_all_other_pages_run_as_written():
    failed = _run([page for page in SCRIPTS if page not in FIRST])
    assert not failed, "\n".join(failed.values())


def commands() -> set[str]:
    """Return the names of all commands."""
    found = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    return found | {path.parent.name for path in (ROOT / "experiments").glob("*/__main__.py")}


def test_pages_name_commands_that_exist():
    pages = [ROOT / "README.md", *(ROOT / ".docs").glob("**/*.md")]
    pages += [path for package in PACKAGES for path in (ROOT / package).rglob("README.md")]
    named = {
        (name, str(page.relative_to(ROOT)))
        for page in pages
        if "generated" not in page.parts and "_build" not in page.parts
        for text in [page.read_text(encoding="utf-8")]
        for name in re.findall(r"`jaxmoe (\w+)", "`".join([text, *shell_lines(text)]))
    }
    known = {*commands(), "NAME"}
    missing = sorted((name, page) for name, page in named if name not in known)
    assert named and not missing, missing


@pytest.fixture(scope="module")
def flag_pages(tmp_path_factory):
    """Return the text of the flag table of each command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / ".docs"))
        import flag_tables
    flag_tables.write(tmp_path_factory.mktemp("flags"))
    return flag_tables.whole_pages()


def test_the_flag_tables_and_the_reference_cover_the_sources(tmp_path, monkeypatch, flag_pages):
    monkeypatch.syspath_prepend(str(ROOT / ".docs"))
    import reference_pages

    for flag in ("--training.steps", "model.moe.router:NAME", "--execution.mesh.data"):
        assert f"`{flag}`" in flag_pages["pretrain"]
    reference_pages.write(ROOT, tmp_path / "reference")
    pages = "".join(page.read_text() for page in (tmp_path / "reference").glob("*.md"))
    for name in ("jaxmoe.training.step.make_train_step", "sharding.mesh.MeshConfig"):
        assert name in pages
    assert pathlib.Path(tmp_path / "reference" / "jaxmoe.routing.md").exists()


FEATURES = ROOT / ".docs" / "features.md"
FEATURE = re.compile(r"^\| (?!feature |---)(.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


MODEL = re.compile(r"[A-Z]+(-\w+)?|runs/\S+")
"""First words of commands that take a model."""


def fault_of_words(words: list[str], page: str) -> str | None:
    """Return what is wrong with the flags and members of a command line, if anything.

    Args:
        words: Command line after the name of the command.
        page: Flag table of the command.
    """
    flags = set(re.findall(r"^\| `--([\w.]+)`", page, re.MULTILINE))
    members = collections.defaultdict(set)
    for path, names in re.findall(r"^\| `([\w.]+):NAME`((?: `\w+`)+)", page, re.MULTILINE):
        members[path] |= set(re.findall(r"\w+", names))
    flag, values = None, 0
    for word in words:
        path, _, name = word.partition(":")
        if word.startswith("--"):
            flag, values = word[2:], 0
            if flag not in flags and flag not in members:
                return f"{word} is no flag"
        elif path in members:
            if name not in members[path]:
                return f"{word}: no such member"
        elif flag is None:
            if word not in {*RECIPES, *transfer.RECIPES}:
                return f"{word} is no recipe"
        else:
            values += 1
            if flag in members and word not in members[flag]:
                return f"--{flag} {word}: no such member"
            if flag in ("methods", "trace") and word not in METHODS:
                return f"--{flag} {word}: no such method"
            if values > 1 and flag not in (*members, "methods", "trace"):
                return f"{word} belongs to no flag"
    return None


def fault_of_code(code: str, pages: dict[str, str]) -> str | None:
    """Return what is wrong with a piece of code on the page of features, if anything.

    Args:
        code: A test, command line, flags of pretrain, target of make, or path.
        pages: Flag table of each command.
    """
    if test := TEST.fullmatch(code):
        path, name = ROOT / test[1], test[2]
        exists = path.exists() and re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE)
        return None if exists else f"{code}: no such test"
    words = code.split()
    if words[0] == "jaxmoe":
        command, words = words[1], words[2:]
        if command not in commands():
            return f"{code}: no such command"
        if words and words[0].startswith("--") and f"{command}_{words[0][2:]}" in pages:
            command = f"{command}_{words[0][2:]}"
            if len(words) == 1 or words[1].startswith("--"):  # a switch, and no flag of the page
                words = words[1:]
        if words and f"{command}_{words[0]}" in pages:
            command, words = f"{command}_{words[0]}", words[1:]
        takes_model = {command, command.rpartition("_")[2]} & MODEL_COMMANDS
        if words and takes_model and MODEL.fullmatch(words[0]):
            words = words[1:]
        fault = fault_of_words(words, pages[command])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        fault = None if words[1:] and {*words[1:]} <= {*targets} else "no such target"
    elif words[0].startswith("--") or ":" in words[0]:
        fault = fault_of_words(words, pages["pretrain"])
    else:
        fault = None if "/" in code and (ROOT / code).exists() else "no such path"
    return fault and f"{code}: {fault}"


def test_the_features_have_their_states_and_evidence():
    text = FEATURES.read_text(encoding="utf-8")
    rows = FEATURE.findall(text)
    assert 100 <= len(rows) == len({feature for feature, _, _ in rows})
    states = collections.Counter(state for _, state, _ in rows)
    assert set(states) == {"yes", "in part", "no"}
    counts = ", ".join(f"{states[state]} {state}" for state in ("yes", "in part", "no"))
    assert f"{len(rows)} features: {counts}." in text
    unproved = [row for row in rows if row[1] != "no" and not TEST.search(row[2])]
    assert not unproved, unproved


def test_what_the_features_name_exists(flag_pages):
    found = re.findall(r"`([^`]+)`", FEATURES.read_text(encoding="utf-8"))
    faults = [fault for code in found if (fault := fault_of_code(code, flag_pages))]
    assert len(found) > 150 and not faults, "\n".join(faults)


def test_what_the_page_of_inference_names_exists(flag_pages):
    page = (ROOT / ".docs" / "inference.md").read_text(encoding="utf-8")
    found = re.findall(r"`([^`]+)`", page)
    faults = [fault for code in found if (fault := fault_of_code(code, flag_pages))]
    assert len(found) > 20 and not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "code",
    [
        "tests/test_documentation.py::test_of_nothing",
        "tests/test_of_nothing.py::test_of_nothing",
        "jaxmoe nothing",
        "jaxmoe pretrain nothing",
        "jaxmoe routers --methods nothing",
        "jaxmoe checkpoint convert --nothing",
        "--model.moe.nothing 1",
        "--model.moe.top_k 1 2",
        "--execution.dispatcher nothing",
        "model.moe.router:nothing",
        "make nothing",
        "jaxmoe/nothing.py",
        "nothing",
    ],
)
def test_names_of_nothing_are_found(code, flag_pages):
    assert fault_of_code(code, flag_pages)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["features.md", "systems.md"])
def test_pretrain_commands_of_the_tables_can_be_typed_as_they_are(page):
    """Every choice fits the recipe that the command takes where none is named.

    Flags alone are those of the command before them in the row, of pretrain where there is none.
    """
    commands = {path.stem for path in (ROOT / "experiments").iterdir()}
    faults, count, command = [], 0, "pretrain"
    text = (ROOT / ".docs" / page).read_text(encoding="utf-8")
    for code in re.findall(r"\n|`[^`\n]+`", text):
        code = code.strip("`")
        if code == "\n":
            command = "pretrain"
            continue
        words = shlex.split(code.removeprefix("jaxmoe "))
        if words[0] in commands:
            command, words = words[0], words[1:]
        elif not re.match(r"--|[a-z_.]+:[a-z0-9_]+( |$)", code):
            continue
        if command != "pretrain":
            continue
        count += 1
        try:
            make_plan(cli.parse(RECIPES, DEFAULT, words, "pretrain", "")[1])
        except (SystemExit, ValueError) as error:
            faults.append(f"{code}: {error}")
    assert count > 20 and not faults, "\n".join(faults)


DOCKERFILE = ROOT / ".docker" / "cuda.Dockerfile"


def test_the_container_installs_what_is_there():
    """Its files, its extras, the command, and an interpreter with pinned packages."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hook = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]
    assert {*PACKAGES, "constraints.txt", "pyproject.toml", hook} <= {*copied}
    assert all((ROOT / name).exists() for name in copied)
    project = settings["project"]
    extras = re.search(r"'\.\[(.+)\]'", text)[1].split(",")
    assert "cuda" in extras and {*extras} <= {*project["optional-dependencies"]}
    (command,) = json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.M)[1])
    assert command in project["scripts"]
    assert json.loads(re.search(r"^CMD (.+)$", text, re.M)[1])[0] in commands()
    assert re.search(r"^FROM python:3\.1[123]-slim$", text, re.M)


WRITTEN = re.compile(
    r"(\d+|Thirteen)\s(routers|selection biases|balancing losses|named methods|methods of workers"
    r"|features)"
)
NUMBERS = {"Thirteen": 13}


def test_numbers_of_members_on_pages_are_those_of_the_catalogue():
    """Choices are counted where they are listed, in the README and on the page of routing."""
    counts = {
        "routers": len(catalog.names("router")),
        "selection biases": len(catalog.names("bias")),
        "balancing losses": len(catalog.names("balancer")),
        "named methods": len(METHODS),
        "methods of workers": len({*catalog.names("replicas")} - {"none"}),
        "features": len(FEATURE.findall(FEATURES.read_text(encoding="utf-8"))),
    }
    pages = [ROOT / "README.md", *(ROOT / ".docs").glob("*.md"), *(ROOT / ".docs").glob("*/*.md")]
    shown = [
        (page.name, NUMBERS.get(number) or int(number), kind)
        for page in pages
        for number, kind in WRITTEN.findall(page.read_text(encoding="utf-8"))
    ]
    wrong = [row for row in shown if counts[row[2]] != row[1]]
    assert len(shown) >= 7 and not wrong, (wrong, counts)
    routing = (ROOT / ".docs" / "concepts" / "routing.md").read_text(encoding="utf-8")
    for kind, part in (("router", "router"), ("bias", "bias"), ("balancer", "balancers")):
        row = re.search(rf"^\| {part} \| `[^`]+` \| (.+) \|$", routing, re.MULTILINE)[1]
        assert {*re.findall(r"`(\w+)`", row)} == {*catalog.names(kind)}, kind
