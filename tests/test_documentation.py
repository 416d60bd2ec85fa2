# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of every page as written, and builds the reference and the flag tables.

The blocks of a page are one script. The pages run one after the other in one process with 8 CPU
devices and JAX's default settings, each in an empty working directory.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

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
    pages += sorted((ROOT / ".docs" / "concepts").glob("*.md"))
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


def test_pages_name_commands_that_exist():
    pages = [ROOT / "README.md", *(ROOT / ".docs").glob("**/*.md")]
    pages += [path for package in PACKAGES for path in (ROOT / package).rglob("README.md")]
    named = {
        (name, str(page.relative_to(ROOT)))
        for page in pages
        if "generated" not in page.parts and "_build" not in page.parts
        for name in re.findall(r"python -m experiments\.(\w+)", page.read_text(encoding="utf-8"))
    }
    commands = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    commands |= {path.parent.name for path in (ROOT / "experiments").glob("*/__main__.py")}
    missing = sorted((name, page) for name, page in named if name not in {*commands, "NAME", "X"})
    assert named and not missing, missing


def test_the_flag_tables_and_the_reference_cover_the_sources(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / ".docs"))
    import flag_tables
    import reference_pages

    flag_tables.write(tmp_path / "flags")
    pretrain = (tmp_path / "flags" / "pretrain.md").read_text()
    for flag in ("--training.steps", "model.moe.router:NAME", "--execution.mesh.data"):
        assert f"`{flag}`" in pretrain
    reference_pages.write(ROOT, tmp_path / "reference")
    pages = "".join(page.read_text() for page in (tmp_path / "reference").glob("*.md"))
    for name in ("jaxmoe.training.step.make_train_step", "sharding.mesh.MeshConfig"):
        assert name in pages
    assert pathlib.Path(tmp_path / "reference" / "jaxmoe.routing.md").exists()
