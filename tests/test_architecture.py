# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The rules of the house, read off the syntax trees and off one subprocess that imports it all.

A failure lists every place as `file:line: what`. To add a registry: a row in REGISTRIES.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping

import pytest

from jaxmoe.configs import registry_of

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Imports flow from right to left only.
PACKAGES = ("pallas_kernels", "sharding", "jaxmoe", "experiments")

# What a module may import at its top, beside the standard library and the packages above.
# etils comes with orbax-checkpoint, whose paths it is.
_OWNERS = {"etils", "jax", "flax", "optax", "orbax", "chex", "numpy", "jaxtyping"}
TOP_LEVEL_IMPORTS = {
    "pallas_kernels": {"jax", "numpy", "jaxtyping"},
    "sharding": {"jax", "numpy", "jaxtyping"},
    "jaxmoe": _OWNERS,
    "experiments": _OWNERS,
}
OPTIONAL_PACKAGES = (
    *(
        "tyro",
        "grain",
        "rich",
        "matplotlib",
        "tensorboardX",
        "tokenizers",
        "scipy",
        "wandb",
        "trackio",
    ),
    *("safetensors", "transformers", "torch", "pytest", "hypothesis", "beartype"),
)

FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, KERNEL_FUNCTION_LINES = 80, 150
HEADER = ["# Copyright 2026 The jaxmoe authors", "# SPDX-License-Identifier: Apache-2.0"]
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

# Every registry, or union of config classes that has none, and the names it must have.
REGISTRIES = {
    "experiments.launch.config:CLUSTERS": {"slurm", "jobset", "tpu_vm"},
    "jaxmoe.data:DATA_SOURCES": {
        *("corpus", "files", "mixture", "huggingface", "markov", "language_mixture"),
    },
    "jaxmoe.data.tokenizer:TOKENIZERS": {"bytes", "file", "trained", "ids"},
    "jaxmoe.models.config:Attentions": {"grouped_query", "latent"},
    "jaxmoe.optim:OPTIMIZERS": {"adamw", "muon", "muonh"},
    "jaxmoe.optim.schedules:SCHEDULES": {"cosine", "linear", "wsd"},
    "jaxmoe.planning.placement:PLACERS": {"exflow", "moetuner", "expert_grouping"},
    "jaxmoe.precision:MatmulConfig": {"full", "halo"},
    "jaxmoe.routing:BIASES": {"loss_free", "bip", "quantile"},
    "jaxmoe.routing:BALANCERS": {
        *("load_balance", "router_z", "heterogeneous", "top_one_balance"),
        *("importance_variation", "load_variation", "coupling"),
    },
    "jaxmoe.routing:GATES": {"softmax", "renormalized", "sqrt"},
    "jaxmoe.routing:METHODS": {
        *("switch", "mixtral", "olmoe", "qwen3", "hyperp", "global_balance", "sequence_balance"),
        *("noisy_topk", "gshard", "x_moe", "erc", "sigma", "top_one_balance", "moe_plus_plus"),
        *("deepseek_v3", "deepseek_v4", "loss_free", "loss_free_rms", "bip", "bip_online"),
        *("quantile", "base", "sinkhorn", "selective_sinkhorn", "kmeans", "hash", "random"),
        *("forced_balance", "expert_choice", "ec_dlm", "soft_moe"),
    },
    "jaxmoe.routing:ROUTERS": {
        *("softmax_topk", "sigmoid_topk", "sqrt_softplus_topk", "noisy_topk", "gshard"),
        *("cosine_topk", "base_layer", "sinkhorn", "selective_sinkhorn", "kmeans"),
        *("hash", "uniform_random", "forced_balance", "progressive_topk", "moe_plus_plus"),
        *("expert_choice", "soft_moe"),
    },
    "jaxmoe.training:OBJECTIVES": {"next_token", "masked_diffusion"},
    "jaxmoe.tracking:TRACKERS": {"tensorboard", "wandb", "trackio"},
    "jaxmoe.scaling:PARAMETERIZATIONS": {
        *("standard", "mup", "mup_plus_plus", "completep", "mup_muon", "mup_plus_plus_muon"),
        *("muonh_vanilla", "hyperp"),
    },
    "sharding.expert_parallel:DispatcherConfig": {
        *("local", "all_gather", "all_to_all", "all_to_all_dropping", "least_loaded"),
    },
    "sharding.sequence_parallel:SequenceParallelConfig": {
        *("none", "auto", "all_gather", "ulysses", "usp", "ring", "token_ring"),
    },
}


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def _modules(*roots: str) -> list[pathlib.Path]:
    return [path for root in roots for path in sorted((ROOT / root).rglob("*.py"))]


def _nodes() -> Iterator[tuple[pathlib.Path, ast.AST]]:
    for path in _modules(*PACKAGES):
        for node in ast.walk(_tree(path)):
            yield path, node


def _at(path: pathlib.Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def _package(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0]


def _module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _check(failures: Iterable[str]) -> None:
    __tracebackhide__ = True
    failures = list(failures)
    assert not failures, "\n" + "\n".join(failures)


def _imported(node: ast.AST) -> list[str]:
    """The top-level packages that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [(node.module or "").partition(".")[0]]
    return []


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def _bound_names(node: ast.AST) -> list[str]:
    """The variables, arguments and fields that a node introduces."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.arg):
        return [node.arg]
    return []


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions directly inside a node, not inside one another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _functions(child)


def _own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    nested = sum(inner.end_lineno - inner.lineno + 1 for inner in _functions(function))
    return function.end_lineno - function.lineno + 1 - nested


def test_there_is_something_to_check():
    assert {_package(path) for path in _modules(*PACKAGES)} == set(PACKAGES)


def test_imports_flow_one_way():
    _check(
        _at(path, node.lineno, f"{_package(path)} imports {name}")
        for path, node in _nodes()
        for name in _imported(node)
        if name == "tests" or name in PACKAGES[PACKAGES.index(_package(path)) + 1 :]
    )


def test_top_level_imports_need_only_the_core_packages():
    _check(
        _at(path, node.lineno, f"{name} is to be imported where it is used")
        for path in _modules(*PACKAGES)
        for node in _outside_functions(_tree(path))
        for name in _imported(node)
        if name not in sys.stdlib_module_names
        and name not in (*PACKAGES, *TOP_LEVEL_IMPORTS[_package(path)])
    )


def test_modules_say_what_they_are():
    _check(
        _at(path, 1, "the module has no docstring")
        for path in _modules(*PACKAGES)
        if not ast.get_docstring(_tree(path))
    )


def test_files_begin_with_the_header():
    _check(
        _at(path, 1, f"does not begin with the two lines {HEADER}")
        for path in _modules(*PACKAGES, "tests")
        if path.read_text().splitlines()[:2] != HEADER
    )


def test_files_are_ascii():
    _check(
        _at(path, number, "is not ASCII")
        for path in _modules(*PACKAGES, "tests")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    )


def test_files_are_short():
    for path in _modules(*PACKAGES):
        limit = KERNEL_FILE_LINES if _package(path) == "pallas_kernels" else FILE_LINES
        lines = len(path.read_text().splitlines())
        assert lines <= limit, _at(path, lines, f"{lines} lines, at most {limit}")


def test_functions_are_short():
    def failures():
        for path, node in _nodes():
            is_kernel = _package(path) == "pallas_kernels"
            limit = KERNEL_FUNCTION_LINES if is_kernel else FUNCTION_LINES
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := _own_lines(node)) > limit:
                    yield _at(path, node.lineno, f"{node.name} has {lines} lines, at most {limit}")

    _check(failures())


def test_own_lines_leave_out_nested_functions():
    source = "def f():\n    x = 1\n    def g():\n        return 1\n    return g\n"
    assert [_own_lines(function) for function in _functions(ast.parse(source))] == [3]


def test_files_are_named_for_what_they_hold():
    _check(
        _at(path, 1, "says nothing by its name")
        for path in _modules(*PACKAGES, "tests")
        if EMPTY_NAMES & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    )


def test_one_room_constrains_shardings():
    room = ROOT / "sharding" / "constrain.py"
    words = {"out_sharding", "reshard", "with_sharding_constraint"}

    def spelled(node: ast.AST) -> set[str]:
        names = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")}
        return {name for name in names if isinstance(name, str)} & words

    _check(
        _at(path, getattr(node, "lineno", 1), f"spells {name}, as only sharding/constrain.py may")
        for path, node in _nodes()
        if path != room
        for name in spelled(node)
    )


def test_no_variable_hides_the_package_sharding():
    def bound(node: ast.AST) -> list[str]:
        if isinstance(node, ast.ImportFrom):
            return [alias.asname or alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            return [alias.asname for alias in node.names if alias.asname]
        return _bound_names(node)

    _check(
        _at(path, node.lineno, "a variable is called sharding: say named_sharding or spec")
        for path, node in _nodes()
        if "sharding" in bound(node)
    )


def test_no_field_or_variable_begins_with_use():
    _check(
        _at(path, node.lineno, f"{name}: make a union, or is_ / has_")
        for path, node in _nodes()
        for name in _bound_names(node)
        if name.startswith("use_")
    )


def test_no_exception_is_caught_blindly():
    def caught(handler: ast.ExceptHandler) -> set[str]:
        if handler.type is None:
            return {"everything"}
        names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        return names & {"Exception", "BaseException"}

    _check(
        _at(path, node.lineno, f"catches {name}")
        for path, node in _nodes()
        if isinstance(node, ast.ExceptHandler)
        for name in caught(node)
    )


def test_only_experiments_print():
    _check(
        _at(path, node.lineno, "prints: log, or return")
        for path, node in _nodes()
        if _package(path) != "experiments"
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    )


def _flags(decorator: ast.expr) -> set[str]:
    """The keywords that a `@dataclasses.dataclass(...)` sets to True."""
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    return {k.arg for k in keywords if isinstance(k.value, ast.Constant) and k.value.value is True}


def test_configs_are_frozen_and_every_field_has_its_help():
    def failures():
        for path, node in _nodes():
            if not (isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
                continue
            flags = set().union(*map(_flags, node.decorator_list))
            if missing := {"frozen", "kw_only", "slots"} - flags:
                yield _at(path, node.lineno, f"{node.name} is not {', '.join(sorted(missing))}")
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.dump(field.annotation):
                    continue
                if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    name = f"{node.name}.{getattr(field.target, 'id', '?')}"
                    yield _at(path, field.lineno, f"{name} has no string beneath it")

    _check(failures())


INERT = """
import importlib, json, logging, os, sys
import chex, flax.linen, jax, numpy, optax, orbax.checkpoint
from jax._src import xla_bridge
modules, optional = json.loads(sys.argv[1])
for name in list(sys.modules):
    if name.partition(".")[0] in optional:
        sys.modules[name] = None
sys.modules.update(dict.fromkeys(optional))
def look():
    return {
        "jax.config": dict(jax.config.values),
        "os.environ": dict(os.environ),
        "logging": (logging.root.level, list(logging.root.handlers)),
    }
before = look()
assert not xla_bridge.backends_are_initialized()
for name in modules:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: cannot be imported: {type(error).__name__}: {error}")
    if xla_bridge.backends_are_initialized():
        print(f"{name}: importing it initialises a backend")
        break
    after = look()
    for place, values in after.items():
        if values != before[place]:
            print(f"{name}: importing it changes {place}")
    before = after
"""


def test_nothing_happens_at_import():
    modules = [_module_name(p) for p in _modules(*PACKAGES) if p.name != "__main__.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", INERT, json.dumps([modules, OPTIONAL_PACKAGES])],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    _check(result.stdout.splitlines())


def _registry(name: str) -> Mapping[str, object]:
    module, _, attribute = name.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    return value if isinstance(value, Mapping) else registry_of(value)


@pytest.mark.parametrize("name", REGISTRIES)
def test_registries_equal_their_contract_table(name):
    assert set(_registry(name)) == REGISTRIES[name]


def test_every_registry_has_a_contract_table():
    def is_registry(node: ast.AST) -> bool:
        call = node.value if isinstance(node, ast.Assign) else None
        return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "registry_of"

    _check(
        _at(path, node.lineno, f"{name} is not in REGISTRIES of tests/test_architecture.py")
        for path, node in _nodes()
        if is_registry(node)
        for target in node.targets
        if (name := f"{_module_name(path)}:{target.id}") not in REGISTRIES
    )
