# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The wheel has one name, and works beside a user's packages `sharding` and `experiments`."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import jaxmoe
from pallas_kernels.public_names import SECOND_NAMES
from tests.support.source_tree import ROOT

PROGRAM = """
import sys
import jaxmoe
from jaxmoe.kernels import grouped_matmul
from jaxmoe.sharding import MeshConfig
import jaxmoe.sharding.mesh
from jaxmoe import catalog
from jaxmoe.configs import public_module

for name in ("sharding", "pallas_kernels", "experiments"):
    assert name not in sys.modules, name
    for module in [name, *([] if name == "experiments" else [f"{name}.helper"])]:
        exec(f"import {module}")
    assert sys.modules[name].OWN
assert jaxmoe.__file__.startswith(sys.argv[1]), jaxmoe.__file__
assert grouped_matmul.__module__.startswith("jaxmoe.kernels."), grouped_matmul.__module__
assert jaxmoe.sharding.mesh.MeshConfig is MeshConfig
local = catalog.choice("dispatcher", "local")
assert local.__module__ == "jaxmoe.sharding.expert_parallel.local", local
print("works beside them")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder with the files of the wheel, as an installation has them."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"jaxmoe-{jaxmoe.__version__}-py3-none-any.whl"
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def users_folder(tmp_path):
    """Folder of a project that has packages of its own with the names of ours."""
    for name in SECOND_NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True\n")
        (tmp_path / name / "helper.py").write_text("")
    return tmp_path


def run(words, site, folder, **environment):
    variables = os.environ | {"PYTHONPATH": str(site)} | environment
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=folder, env=variables
    )


def test_every_file_of_the_checkout_is_in_the_wheel_under_its_second_name(site):
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    folders = {"jaxmoe": "jaxmoe"} | {
        name: second.replace(".", "/") for name, second in SECOND_NAMES.items()
    }
    expected = {
        f"{folder}/{path.relative_to(ROOT / name)}"
        for name, folder in folders.items()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    stand_ins = {f"{name}/__init__.py" for name in SECOND_NAMES}
    assert {name for name in files if ".dist-info" not in name} == expected | stand_ins


def test_no_module_of_the_wheel_imports_by_a_name_of_the_checkout(site):
    imports = []
    for path in sorted((site / "jaxmoe").rglob("*.py*")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [name for node in ast.walk(tree) for name in modules_of(node)]
        firsts = [name.partition(".")[0] for name in names]
        imports += [(path, name) for name in firsts if name in SECOND_NAMES]
    assert imports == []


def modules_of(node):
    """Modules that a node imports, or whose address it is."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if re.fullmatch(r"\w+(\.\w+)+(:\w+)?", node.value) else []
    return []


def test_a_program_beside_packages_of_these_names_has_ours_under_one_name(site, users_folder):
    (users_folder / "program.py").write_text(PROGRAM)
    result = run(["program.py", str(site)], site, users_folder)
    assert (result.returncode, result.stdout) == (0, "works beside them\n"), result.stderr


def test_the_names_of_a_checkout_stand_for_the_same_modules(site, tmp_path):
    program = (
        "import sharding.mesh, jaxmoe.sharding.mesh, pallas_kernels, jaxmoe.kernels\n"
        "assert sharding is jaxmoe.sharding and pallas_kernels is jaxmoe.kernels\n"
        "assert sharding.mesh is jaxmoe.sharding.mesh\n"
        "assert sharding.mesh.__spec__.name == 'jaxmoe.sharding.mesh'\n"
        f"assert sharding.mesh.__file__.startswith({str(site)!r}), sharding.mesh.__file__\n"
    )
    result = run(["-c", program], site, tmp_path)
    assert result.returncode == 0, result.stderr
    result = run(["-m", "experiments", "--version"], site, tmp_path)
    assert result.stdout == f"jaxmoe {jaxmoe.__version__}\n", result.stderr


def test_the_checkout_knows_the_names_of_the_wheel():
    import jaxmoe.kernels
    import jaxmoe.sharding.mesh
    import pallas_kernels
    import sharding.mesh

    assert jaxmoe.sharding.mesh is sharding.mesh and jaxmoe.kernels is pallas_kernels
    assert sharding.mesh.__spec__.name == "sharding.mesh"


def test_a_checkout_beside_packages_of_these_names_says_what_to_do(users_folder):
    shutil.rmtree(users_folder / "pallas_kernels")
    result = run(["-c", "import jaxmoe"], ROOT, users_folder)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == (
        f"ImportError: the checkout of jaxmoe at {ROOT} needs its own package 'sharding', and"
        f" Python finds {users_folder}/sharding/__init__.py first: install jaxmoe (pip install"
        f" {ROOT}), which has all of it under one name, or start Python in another folder"
    )


def test_the_console_command_is_the_wheels(site):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    scripts = {"jaxmoe": "jaxmoe.experiments.__main__:main"}
    assert project["project"]["scripts"] == scripts
    (entry,) = site.glob("*.dist-info/entry_points.txt")
    assert "jaxmoe = jaxmoe.experiments.__main__:main" in entry.read_text()
    for package in ("", "sharding/", "kernels/"):
        assert (site / "jaxmoe" / package / "py.typed").exists()


@pytest.mark.slow
def test_commands_of_the_wheel_train_and_start_their_children(site, users_folder):
    start = "import sys; sys.path.remove(''); sys.argv[0] = 'jaxmoe';"
    command = ["-c", f"{start} from jaxmoe.experiments.__main__ import main; sys.exit(main())"]
    short = ["--training.steps", "2", "--schedule.warmup_steps", "1", "--evaluation.batches", "1"]
    result = run([*command, "pretrain", "tiny", *short], site, users_folder)
    assert result.returncode == 0, result.stderr
    assert (users_folder / "runs/pretrain/tiny/report.html").exists()
    assert "experiments." not in result.stdout, result.stdout
    small = ["--model.num_layers", "2", "--training.sequence_length", "64"]
    plan = ["plan", "tiny", "--topology", "cpu:8", *small]
    result = run([*command, *plan], site, users_folder)
    assert result.returncode == 0 and "predicted and measured" in result.stdout, result.stderr
