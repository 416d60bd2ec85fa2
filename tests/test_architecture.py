# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the layout rules of the design on syntax trees, and imports in one subprocess.

A failure lists every place as `file:line: what`. To add a registry: a row in REGISTRIES.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from jaxmoe.configs import registry_of
from tests.support.source_tree import (
    PACKAGES,
    ROOT,
    at,
    bound_names,
    check,
    functions,
    imported,
    module_name,
    modules,
    nodes,
    outside_functions,
    own_lines,
    package,
    tree,
)

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
    "tyro",
    "grain",
    "rich",
    "matplotlib",
    "tensorboardX",
    "tokenizers",
    "scipy",
    "wandb",
    "trackio",
    "jinja2",
    "safetensors",
    "transformers",
    "torch",
    "pytest",
    "hypothesis",
    "beartype",
)

# The packages of jaxmoe from the lowest to the highest: a package imports lower ones only.
ORDER = (
    "errors",
    "public_names",
    "catalog",
    "choices",
    "combinations",
    "configs",
    "field_docs",
    "disk",
    "host_memory",
    "json_bounds",
    "optional",
    "state_tree",
    "fingerprints",
    "messages",
    "declarations",
    "parameters",
    "precision",
    "kernel_choices",
    "execution",
    "routing",
    "layers",
    "parts",
    "nnx",
    "adapters",
    "models",
    "optim",
    "scaling",
    "data",
    "training",
    "checkpoint",
    "generation",
    "tracking",
    "resilience",
    "planning",
    "serve",
    "run",
    "contrib",
)
FOLDER_FILES = 22

FILE_LINES, KERNEL_FILE_LINES = 500, 600
FUNCTION_LINES, KERNEL_FUNCTION_LINES = 80, 150
HEADER = ["# Copyright 2026 The jaxmoe authors", "# SPDX-License-Identifier: Apache-2.0"]
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

# Every registry, or union of config classes that has none, and the names it must have.
REGISTRIES = {
    "experiments.launch.config:CLUSTERS": {"slurm", "jobset", "tpu_vm"},
    "jaxmoe.training.parts.average:AVERAGES": {"fixed", "balanced"},
    "jaxmoe.adapters:ADAPTERS": {
        "lora",
        "select",
        "adalora",
        "switch_lora",
        "mixture_of_shards",
        "lift",
        "quantised_choices",
        "task_lora",
        "lora_mixer",
        "multi_head_routing",
        "remix",
        "shared_store",
    },
    "jaxmoe.checkpoint.huggingface.family:FAMILIES": {
        "longcat_flash",
        "deepseek_v32",
        "mimo_v2_flash",
        "olmoe",
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "jamba",
        "granitemoehybrid",
        "dots1",
        "granitemoe",
        "deepseek_v2",
        "glm4_moe_lite",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "exaone_moe",
        "dbrx",
        "lfm2_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "flex_olmo",
        "afmoe",
        "phimoe",
        "cohere2_moe",
        "qwen2_moe",
        "gpt_oss",
        "glm4_moe",
        "solar_open",
        "ernie4_5_moe",
        "minimax_m2",
        "llama4_text",
        "nemotron_h",
        "minimax",
        "kimi_linear",
        "bailing_moe",
        "bailing_moe_v2_5",
        "bailing_hybrid",
        "jetmoe",
    },
    "jaxmoe.data:DATA_SOURCES": {
        "corpus",
        "files",
        "chat",
        "mixture",
        "huggingface",
        "markov",
        "language_mixture",
        "tokenizer_only",
    },
    "jaxmoe.contrib.levels:ASSIGNERS": {"buckets", "milp", "zones"},
    "jaxmoe.data.tokenizer:TOKENIZERS": {"bytes", "file", "trained", "ids"},
    "jaxmoe.layers.feed_forwards:FEED_FORWARDS": {
        "dense",
        "moe",
        "none",
        "shortcut_dense",
        "biased_moe",
        "ultra_mem",
        "two_sizes",
    },
    "jaxmoe.layers.feed_forwards:ACTIVATIONS": {
        "swiglu",
        "clamped_swiglu",
        "geglu",
        "relu_squared",
    },
    "jaxmoe.layers.mixers:MIXERS": {
        "grouped_query",
        "latent",
        "mamba",
        "mamba2",
        "shared_keys",
        "parallel_streams",
        "short_convolution",
        "gated_delta",
        "kimi_delta",
        "narrow_values",
        "sparse_latent",
        "scaled_latent",
        "gated_latent",
        "expert_heads",
        "lightning",
        "rotary_lightning",
    },
    "jaxmoe.layers.norms:NORMS": {"rms", "centred_rms", "rms_of_layers", "layer"},
    "jaxmoe.layers.residual:RESIDUALS": {"standard", "ladder", "parallel", "weighted", "hyper"},
    "jaxmoe.optim:OPTIMIZERS": {"adamw", "muon", "muonh", "mkor", "sgd"},
    "jaxmoe.optim.schedules:SCHEDULES": {"cosine", "linear", "wsd"},
    "jaxmoe.contrib.placement:PLACERS": {"exflow", "moetuner", "expert_grouping"},
    "jaxmoe.precision:MATMULS": {"full", "halo"},
    "jaxmoe.routing:BIASES": {"loss_free", "bip", "quantile"},
    "jaxmoe.routing:BALANCERS": {
        "load_balance",
        "router_z",
        "heterogeneous",
        "top_one_balance",
        "importance_variation",
        "load_variation",
        "coupling",
    },
    "jaxmoe.routing:CAPACITIES": {"capacity", "token_rounding"},
    "jaxmoe.routing:GATES": {"softmax", "renormalized", "sqrt"},
    "jaxmoe.routing:METHODS": {
        "switch",
        "mixtral",
        "olmoe",
        "qwen3",
        "hyperp",
        "global_balance",
        "sequence_balance",
        "noisy_topk",
        "gshard",
        "x_moe",
        "erc",
        "sigma",
        "top_one_balance",
        "moe_plus_plus",
        "token_rounding",
        "stochastic_rounding",
        "deepseek_v3",
        "deepseek_v4",
        "loss_free",
        "loss_free_rms",
        "bip",
        "bip_online",
        "quantile",
        "base",
        "sinkhorn",
        "selective_sinkhorn",
        "kmeans",
        "hash",
        "random",
        "forced_balance",
        "expert_choice",
        "ec_dlm",
        "soft_moe",
    },
    "jaxmoe.routing:ROUTERS": {
        "softmax_topk",
        "sparse_mixer",
        "sigmoid_topk",
        "sqrt_softplus_topk",
        "noisy_topk",
        "gshard",
        "cosine_topk",
        "base_layer",
        "sinkhorn",
        "selective_sinkhorn",
        "kmeans",
        "hash",
        "uniform_random",
        "forced_balance",
        "progressive_topk",
        "moe_plus_plus",
        "expert_choice",
        "soft_moe",
    },
    "jaxmoe.contrib.rl.rewards:REWARDS": {"arithmetic", "countdown", "match", "python"},
    "jaxmoe.contrib.serving_lab.caches:ITEM_CACHES": {
        "lru",
        "lfu",
        "belady",
        "scores",
        "predicted",
        "window",
        "category",
    },
    "jaxmoe.contrib.serving_lab.batching:SIMULATED_BATCHING": {
        "layered",
        "flow_prefill",
        "nexus",
        "semi_pd",
        "nano_batches",
    },
    "jaxmoe.serve.policies.batching:BATCHING": {
        "split_fuse",
        "prefill_first",
        "laps",
        "batch_llm",
    },
    "jaxmoe.contrib.fleet.dispatch:DISPATCH": {
        "round_robin",
        "least_loaded",
        "prefix_aware",
        "dual_map",
        "llumnix",
        "dist_serve",
        "pd_serve",
        "prfaas",
        "saga",
    },
    "jaxmoe.serve.policies.retention:RETENTION": {"lru", "swap_groups"},
    "jaxmoe.serve.http.tools:TOOL_PARSERS": {
        "hermes",
        "mistral",
        "llama3_json",
        "deepseek_v3",
        "deepseek_v31",
    },
    "jaxmoe.serve.http.reasoning:REASONING_PARSERS": {"none", "think_tags"},
    "jaxmoe.contrib.fleet.scaling:SCALING": {"fixed", "slo", "elastic_experts", "polca"},
    "jaxmoe.contrib.serving_lab.simulation.workload:WORKLOADS": {"gamma", "sessions", "file"},
    "jaxmoe.training:OBJECTIVES": {
        "next_token",
        "masked_diffusion",
        "swept_layers",
        "multi_token_prediction",
        "policy_gradient",
    },
    "jaxmoe.training.estimators:ESTIMATORS": {
        "backprop",
        "spsa",
        "seed_pool",
        "evolution",
        "surrogate",
    },
    "jaxmoe.training.replicas:REPLICAS": {
        "none",
        "diloco",
        "streaming",
        "sparse",
        "noloco",
        "co2",
        "single_merge",
        "spes",
        "a2cid2",
        "heterogeneous",
        "coded",
        "econtrol",
        "one_bit_adam",
        "robust",
    },
    "jaxmoe.tracking:TRACKERS": {"tensorboard", "wandb", "trackio"},
    "jaxmoe.scaling:PARAMETERIZATIONS": {
        "standard",
        "mup",
        "mup_plus_plus",
        "completep",
        "mup_muon",
        "mup_plus_plus_muon",
        "muonh_vanilla",
        "hyperp",
    },
    "sharding.expert_parallel:Dispatcher": {
        "local",
        "all_gather",
        "all_to_all",
        "all_to_all_dropping",
        "least_loaded",
    },
    "sharding.products.collective:TensorProductsConfig": {"whole", "ring"},
    "sharding.pipeline:PipelineOrder": {"interleaved", "gpipe"},
    "sharding.sequence_parallel:CacheReading": {"whole", "pages"},
    "sharding.sequence_parallel:SequenceParallelism": {
        "none",
        "auto",
        "all_gather",
        "ulysses",
        "usp",
        "ring",
        "token_ring",
        "levels",
    },
}


def test_there_is_something_to_check():
    assert {package(path) for path in modules(*PACKAGES)} == set(PACKAGES)


def test_imports_flow_one_way():
    check(
        at(path, node.lineno, f"{package(path)} imports {name}")
        for path, node in nodes()
        for name in imported(node)
        if name == "tests" or name in PACKAGES[PACKAGES.index(package(path)) + 1 :]
    )


def _place(name: str) -> str:
    """The package of a module of jaxmoe: `routing` of `jaxmoe.routing.gates`."""
    return name.removeprefix("jaxmoe.").partition(".")[0]


def _jaxmoe_imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """The line and the package of each import of jaxmoe."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxmoe":
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxmoe."):
            yield node.lineno, _place(str(node.module))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("jaxmoe."):
                    yield node.lineno, _place(alias.name)


def test_packages_of_jaxmoe_are_ordered():
    def failures():
        for path in modules("jaxmoe"):
            if module_name(path) in ("jaxmoe", "jaxmoe.contrib"):  # the first re-exports
                continue
            own = _place(module_name(path))
            if own not in ORDER:
                yield at(path, 1, f"{own} has no place in ORDER of tests/test_architecture.py")
                continue
            for line, imported_package in _jaxmoe_imports(path):
                if imported_package not in ORDER:
                    yield at(path, line, f"imports {imported_package}, which ORDER does not name")
                elif ORDER.index(imported_package) > ORDER.index(own):
                    yield at(path, line, f"{own} imports {imported_package}, a higher package")

    check(failures())


def test_verticals_stand_above_all_packages():
    assert _place("jaxmoe.contrib.elastic.request") == ORDER[-1] == "contrib"


def test_folders_are_small():
    def failures():
        for folder in sorted({path.parent for path in modules(*PACKAGES)}):
            if (count := len(list(folder.glob("*.py")))) > FOLDER_FILES:
                yield at(folder, 0, f"holds {count} files, at most {FOLDER_FILES}: add sub-folders")

    check(failures())


def _config_classes() -> dict[str, pathlib.Path]:
    """Every dataclass named `...Config` and the file that defines it."""
    return {
        node.name: path
        for path, node in nodes()
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    }


def _owner(path: pathlib.Path) -> tuple[str, ...]:
    """The package that a file belongs to: two folders deep, or the file itself below one."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:2]


def _asked_classes(node: ast.AST) -> Iterator[str]:
    """The classes that an `isinstance` or a `match` statement asks for."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
        for inner in ast.walk(node.args[1]):
            if isinstance(inner, ast.Name | ast.Attribute):
                yield inner.id if isinstance(inner, ast.Name) else inner.attr
    if isinstance(node, ast.MatchClass):
        for inner in ast.walk(node.cls):
            if isinstance(inner, ast.Name | ast.Attribute):
                yield inner.id if isinstance(inner, ast.Name) else inner.attr


def test_only_its_own_package_asks_for_the_class_of_a_config():
    classes = _config_classes()
    check(
        at(path, getattr(node, "lineno", 0), f"asks for {name}: make it an attribute of the config")
        for path, node in nodes()
        for name in _asked_classes(node)
        if name in classes and _owner(classes[name]) != _owner(path)
    )


# Called by a framework, by Python, or by users of the documented API, never by name in our code.
CALLED_FROM_OUTSIDE = {
    "setup": "flax",
    "emit": "logging",
    "main": "python -m",
    **dict.fromkeys(("create_module", "exec_module", "is_package"), "importlib"),
    **dict.fromkeys(("unbox", "replace_boxed", "add_axis", "remove_axis"), "flax.core.meta"),
    **dict.fromkeys(("to_nnx_metadata", "from_nnx_metadata"), "flax.nnx.bridge"),
    **dict.fromkeys(("eot_token_id", "tok_encode", "loglikelihood_rolling"), "lm-eval"),
    "_loglikelihood_tokens": "lm-eval",
}


def test_every_definition_is_reached():
    """A function or class that nothing names, its own definition apart, is deleted or documented.

    Names are compared, not scopes: a name that occurs anywhere in the four packages counts, and so
    does one in the stub of a package, in a README or on a page of the documentation.
    """
    named: dict[str, int] = {}
    for _, node in nodes():
        found = []
        if isinstance(node, ast.Name):
            found = [node.id]
        elif isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.alias):
            found = [*node.name.split("."), node.asname or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = re.sub(r"[\w.]*:", "", node.value)  # of an address, what it names
            found = [name] if name.isidentifier() else []
        for name in found:
            named[name] = named.get(name, 0) + 1
    pages = [*ROOT.glob("*.md"), *ROOT.glob(".docs/*.md"), *ROOT.glob(".docs/concepts/*.md")]
    for kind in ("*.md", "*.pyi"):
        pages += [page for package in PACKAGES for page in (ROOT / package).rglob(kind)]
    words = set(re.findall(r"\w+", " ".join(page.read_text(encoding="utf-8") for page in pages)))
    check(
        at(path, node.lineno, f"nothing names {node.name}")
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (node.name.startswith("__") and node.name.endswith("__"))
        and node.name not in named
        and node.name not in words
        and node.name not in CALLED_FROM_OUTSIDE
        # `@pl.when(...) def _store()` runs where it is defined.
        and not (node.name.startswith("_") and node.decorator_list)
    )


def test_top_level_imports_need_only_the_core_packages():
    check(
        at(path, node.lineno, f"{name} is to be imported where it is used")
        for path in modules(*PACKAGES)
        for node in outside_functions(tree(path))
        for name in imported(node)
        if name not in sys.stdlib_module_names
        and name not in (*PACKAGES, *TOP_LEVEL_IMPORTS[package(path)])
    )


def test_modules_say_what_they_are():
    check(
        at(path, 1, "the module has no docstring")
        for path in modules(*PACKAGES)
        if not ast.get_docstring(tree(path))
    )


def test_files_begin_with_the_header():
    check(
        at(path, 1, f"does not begin with the two lines {HEADER}")
        for path in modules(*PACKAGES, "tests")
        if path.read_text().splitlines()[:2] != HEADER
    )


def test_files_are_ascii():
    check(
        at(path, number, "is not ASCII")
        for path in modules(*PACKAGES, "tests")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    )


def test_files_are_short():
    for path in modules(*PACKAGES):
        limit = KERNEL_FILE_LINES if package(path) == "pallas_kernels" else FILE_LINES
        lines = len(path.read_text().splitlines())
        assert lines <= limit, at(path, lines, f"{lines} lines, at most {limit}")


def test_functions_are_short():
    def failures():
        for path, node in nodes():
            is_kernel = package(path) == "pallas_kernels"
            limit = KERNEL_FUNCTION_LINES if is_kernel else FUNCTION_LINES
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := own_lines(node)) > limit:
                    yield at(path, node.lineno, f"{node.name} has {lines} lines, at most {limit}")

    check(failures())


def test_own_lines_leave_out_nested_functions():
    source = "def f():\n    x = 1\n    def g():\n        return 1\n    return g\n"
    assert [own_lines(function) for function in functions(ast.parse(source))] == [3]


def test_files_are_named_for_what_they_hold():
    check(
        at(path, 1, "says nothing by its name")
        for path in modules(*PACKAGES, "tests")
        if EMPTY_NAMES & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    )


def test_one_room_constrains_shardings():
    room = ROOT / "sharding" / "constrain.py"
    words = {"out_sharding", "reshard", "with_sharding_constraint"}

    def spelled(node: ast.AST) -> set[str]:
        names = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")}
        return {name for name in names if isinstance(name, str)} & words

    check(
        at(path, getattr(node, "lineno", 1), f"spells {name}, as only sharding/constrain.py may")
        for path, node in nodes()
        if path != room
        for name in spelled(node)
    )


def test_no_variable_hides_the_package_sharding():
    def bound(node: ast.AST) -> list[str]:
        if isinstance(node, ast.ImportFrom):
            return [alias.asname or alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            return [alias.asname for alias in node.names if alias.asname]
        return bound_names(node)

    check(
        at(path, node.lineno, "a variable is called sharding: say named_sharding or spec")
        for path, node in nodes()
        if "sharding" in bound(node)
    )


def test_no_field_or_variable_begins_with_use():
    check(
        at(path, node.lineno, f"{name}: make a union, or is_ / has_")
        for path, node in nodes()
        for name in bound_names(node)
        if name.startswith("use_")
    )


def test_no_exception_is_caught_blindly():
    def caught(handler: ast.ExceptHandler) -> set[str]:
        if handler.type is None:
            return {"everything"}
        names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        return names & {"Exception", "BaseException"}

    check(
        at(path, node.lineno, f"catches {name}")
        for path, node in nodes()
        if isinstance(node, ast.ExceptHandler)
        for name in caught(node)
    )


def test_only_experiments_print():
    check(
        at(path, node.lineno, "prints: log, or return")
        for path, node in nodes()
        if package(path) != "experiments"
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
        for path, node in nodes():
            if not (isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
                continue
            flags = set().union(*map(_flags, node.decorator_list))
            if missing := {"frozen", "kw_only", "slots"} - flags:
                yield at(path, node.lineno, f"{node.name} is not {', '.join(sorted(missing))}")
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.dump(field.annotation):
                    continue
                if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    name = f"{node.name}.{getattr(field.target, 'id', '?')}"
                    yield at(path, field.lineno, f"{name} has no string beneath it")

    check(failures())


INERT = """
import importlib, json, logging, os, sys
import chex, flax.linen, flax.nnx, jax, numpy, optax, orbax.checkpoint
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
    names = [module_name(p) for p in modules(*PACKAGES) if p.name != "__main__.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", INERT, json.dumps([names, OPTIONAL_PACKAGES])],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    check(result.stdout.splitlines())


def _registry(name: str) -> Mapping[str, object]:
    module, _, attribute = name.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    return value if isinstance(value, Mapping) else registry_of(value)


# Registries whose contract table is in their own test, which compares it with the registry.
ROWS_ELSEWHERE = {f"jaxmoe.routing:{name}" for name in ("ROUTERS", "GATES", "BALANCERS", "BIASES")}
ROWS_ELSEWHERE |= {"jaxmoe.layers.mixers:MIXERS", "jaxmoe.layers.feed_forwards:FEED_FORWARDS"}
ROWS_ELSEWHERE |= {"jaxmoe.optim:OPTIMIZERS"}


@pytest.mark.parametrize("name", REGISTRIES)
def test_registries_equal_their_contract_table(name):
    names = set(_registry(name))
    assert names >= REGISTRIES[name], "a name that users rely on is gone"
    if name not in ROWS_ELSEWHERE:
        assert names == REGISTRIES[name]


REGISTRY_CALLS = {"Registry", "registry_of"}


def test_every_registry_has_a_contract_table():
    def is_registry(node: ast.AST) -> bool:
        call = node.value if isinstance(node, ast.Assign) else None
        return isinstance(call, ast.Call) and getattr(call.func, "id", "") in REGISTRY_CALLS

    check(
        at(path, node.lineno, f"{name} is not in REGISTRIES of tests/test_architecture.py")
        for path, node in nodes()
        if is_registry(node)
        for target in node.targets
        if (name := f"{module_name(path)}:{target.id}") not in REGISTRIES
    )
