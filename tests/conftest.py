# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configures pytest: devices, strictness, seeds, golden files, rotation, and a summary of skips.

    pytest                       what is neither slow nor large and needs no accelerator
    pytest --ring core           the same of the core, and one row of each vertical
    pytest --ring verticals      the other rows of verticals (support/verticals.py)
    pytest --slow                the long proofs as well, of their tables some rows
    pytest -m large --part 2/10  of the rows that are large, the third of ten parts
    pytest -m slow               any other choice; nothing else is left out then
    pytest --costs FILE          records what each test costs (support/costs.py)
    pytest --regenerate-golden   writes tests/golden anew, to be reviewed as a diff

Everything runs on 8 devices of the CPU. The environment is set before JAX is imported and reaches
the commands that tests start; strictness is for this process alone.

Of a long proof that is a table `make test-slow` runs the first row, of a table marked `rows(n)` n
rows run, evenly spaced; the others are large (`make test-large`). The suite of faults runs whole.

To add an exception to "warnings are errors": a line in WARNINGS, with its reason.
"""

import collections
import gc
import importlib
import json
import os
import pathlib
import sys
import zlib

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
NUM_DEVICES = 8

if "jax" in sys.modules:
    raise pytest.UsageError("a plugin imported jax before tests/conftest.py could choose devices")

_FLAGS = {
    "xla_force_host_platform_device_count": NUM_DEVICES,
    # Eight devices on two busy cores meet late in a collective; the default gives up after 40 s.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
}
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), *(f"--{name}={value}" for name, value in _FLAGS.items())]
).strip()
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # accelerator tests: JAX_PLATFORMS=cuda,cpu pytest -m accelerator
    "NPROC": "32",  # threads: kernels in TPU interpret mode hang with fewer than devices
    "TF_CPP_MIN_LOG_LEVEL": "1",
    # The places of operations in source files cost 4% of the suite, and no test reads them.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    # What Python compiles is kept, outside of the sources: commands start in half the time.
    "PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "python"),
    # JAX's key holds its version, the program, the flags and the devices, so that Pythons and
    # workers may share one directory; for the race between workers see WARNINGS.
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
# Tracing makes and drops many small objects: looking for cycles among them less often saves 4%.
gc.set_threshold(200_000, 50, 1000)

import jax  # noqa: E402  (after the environment that it reads)
import jaxtyping  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ROWS = 1
FAULTS = ROOT / "tests" / "faults"

# Annotations and shapes are checked (support/checked_calls.py), except in the long proofs. The
# trackers are left out: they hold no arrays, and accept NumPy numbers as floats and any stream as a
# text file.
_packages = sorted(path.stem for path in (ROOT / "jaxmoe").iterdir() if path.stem[0] not in "_.")
CHECKED = ("pallas_kernels", "sharding", "experiments") + tuple(
    f"jaxmoe.{name}" for name in _packages if name != "tracking"
)
pytest.register_assert_rewrite("tests.support")
_checked_calls = importlib.import_module("tests.support.checked_calls")

# The same examples on every run, so that a failure comes from the change.
hypothesis.settings.register_profile("jaxmoe", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jaxmoe")

WARNINGS = (
    "error",
    # Two workers compile the same program at once and one reads what the other has half written:
    # it does not decompress, and JAX compiles.
    "ignore:Error reading persistent compilation cache entry:UserWarning",
    # Advice on combinations that tests make on purpose (RoutingWarning; its test asks for it).
    r"ignore:moe\.:UserWarning",
    # A file left open is found by the garbage collector during an unrelated test: shown only.
    "default::ResourceWarning",
    "default::pytest.PytestUnraisableExceptionWarning",
)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the long proofs as well")
    parser.addoption(
        "--ring", choices=("core", "verticals"), help="one row of each vertical, or the others"
    )
    parser.addoption("--part", metavar="K/N", help="part K, from 0, of N of the large rows")
    parser.addoption("--proofs", metavar="FILE", help="write what `make test` leaves out, as JSON")
    parser.addoption("--costs", metavar="FILE", help="record what each test costs, as JSON")
    parser.addoption(
        "--regenerate-golden", action="store_true", help="write tests/golden instead of comparing"
    )


def pytest_configure(config):
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    if config.getoption("--costs"):
        costs = importlib.import_module("tests.support.costs")
        config.pluginmanager.register(costs.Recorder(), "costs")
    if not config.option.markexpr:
        is_slow = config.getoption("--slow")
        config.option.markexpr = "not accelerator and not large" + (not is_slow) * " and not slow"
    if "slow" not in config.option.markexpr.replace("not slow", ""):
        _checked_calls.install()
        jaxtyping.install_import_hook(CHECKED, "tests.support.checked_calls.check")
    if "not slow" in config.option.markexpr or "not trains" in config.option.markexpr:
        # Most tests compile much and compute little: this halves the time of a compilation. It
        # is read when the first backend starts, and inherited by workers and commands.
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    if "not slow" in config.option.markexpr:
        # This halves it again. The long proofs keep XLA's usual fusion: some compare the results of
        # two programs bitwise, and this option fuses them differently.
        os.environ["XLA_FLAGS"] += (
            " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        )


def pytest_runtestloop(session):
    """Start the devices before the first test, which may change the environment for a command."""
    if not session.config.option.collectonly and session.items:
        jax.devices()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    tables: dict[tuple[str, int | None], list[pytest.Item]] = {}
    for item in items:
        asked, is_slow = item.get_closest_marker("rows"), item.get_closest_marker("slow")
        most = (
            asked.args[0]
            if asked
            else ROWS
            if is_slow and FAULTS not in item.path.parents
            else None
        )
        tables.setdefault((item.nodeid.partition("[")[0], most), []).append(item)
    for (_, most), rows in tables.items():
        if most is not None and len(rows) > most:
            apart = (len(rows) - 1) / max(most - 1, 1)
            kept = {round(number * apart) for number in range(most)}
            for number in {*range(len(rows))} - kept:
                rows[number].add_marker("large")
    if part := config.getoption("--part"):
        take_part(config, items, part)
    ring = config.getoption("--ring")
    if ring or config.getoption("--proofs"):
        verticals = importlib.import_module("tests.support.verticals")
        smoke = {row.smoke for row in verticals.VERTICALS.values()}
        outside = [item for item in items if vertical_of(item) and item.nodeid not in smoke]
        if ring == "core":
            _deselected["verticals"] = sum(kind_of(item, True) == "fast" for item in outside)
        if path := config.getoption("--proofs"):
            write_proofs(pathlib.Path(path), items, {item.nodeid for item in outside})
        if ring:
            ids = {item.nodeid for item in outside}
            items[:] = [item for item in items if (item.nodeid in ids) == (ring == "verticals")]


def take_part(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    """Leave out the large rows of other parts; the rows of a table are dealt out in turn.

    Args:
        config: Of this run of pytest.
        items: Tests, of which those that are not large stay.
        part: Number of the part, from 0, and of parts: `2/10`.

    Raises:
        UsageError: It is no part.
    """
    number, _, most = part.partition("/")
    if not (number.isdecimal() and most.isdecimal() and int(number) < int(most)):
        raise pytest.UsageError(f"--part {part} is none: give K/N with K from 0 to N - 1")
    counts: collections.Counter[str] = collections.Counter()
    mine, others = [], []
    for item in items:
        is_mine = True
        if item.get_closest_marker("large"):
            table = item.nodeid.partition("[")[0]
            counts[table] += 1
            is_mine = (zlib.crc32(table.encode()) + counts[table]) % int(most) == int(number)
        (mine if is_mine else others).append(item)
    items[:] = mine
    config.hook.pytest_deselected(items=others)


def kind_of(item: pytest.Item, is_outside: bool) -> str | None:
    """Return the kind of proof that a test belongs to (support/due.py), None for `make test`."""
    is_slow, is_large, needs_device, trains = map(
        bool, map(item.get_closest_marker, ("slow", "large", "accelerator", "trains"))
    )
    if is_large or needs_device:
        return None
    if is_slow:
        return "trains" if trains else "slow"
    return "fast" if is_outside else None


def write_proofs(path: pathlib.Path, items: list[pytest.Item], outside: set[str]) -> None:
    """Write the kind, file and vertical of each proof among some tests."""
    rows = {}
    for item in items:
        if kind := kind_of(item, item.nodeid in outside):
            file = item.path.relative_to(ROOT).as_posix()
            rows[kind, file] = {"kind": kind, "path": file, "vertical": vertical_of(item)}
    path.write_text(json.dumps([rows[key] for key in sorted(rows)]))


def vertical_of(item: pytest.Item) -> str | None:
    """Return the vertical that a test or row belongs to, None for the core."""
    verticals = importlib.import_module("tests.support.verticals")
    if mark := item.get_closest_marker("vertical"):
        return mark.args[0]
    return verticals.vertical_of(item.path.relative_to(ROOT).as_posix())


@pytest.fixture(scope="module", autouse=True)
def _check_first_calls():
    """Check the annotations of what each file of tests calls."""
    _checked_calls.begin_file()


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Compiled programs are mapped memory, of which a process may have only so many pieces: with
    those of all modules in one worker the kernel refuses more, and XLA aborts."""
    yield
    jax.clear_caches()
    # Some programs for CPUs are kept out of the cache: see sharding/stored_programs.py.
    seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@pytest.fixture
def key(request):
    """A random key that depends on the name of the test, parameters included, alone."""
    return jax.random.key(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def golden(request):
    """`golden(name, text)`: the text must be that of the file tests/golden/name."""

    def check(name: str, text: str) -> None:
        __tracebackhide__ = True
        path = GOLDEN / name
        if request.config.getoption("--regenerate-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        assert path.exists(), f"{path} is missing: run pytest --regenerate-golden"
        assert text == path.read_text(encoding="ascii"), "pytest --regenerate-golden, and review"

    return check


# With xdist the tests are chosen in the workers, and the summary is written where they report to.
_deselected: dict[str, int] = {}


def pytest_deselected(items):
    _deselected["choice"] = _deselected.get("choice", 0) + len(items)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = _deselected


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    # Every worker collects, and leaves out, the same tests.
    _deselected.update(getattr(node, "workeroutput", {}).get("deselected", {}))


def pytest_terminal_summary(terminalreporter, config):
    """How many ran, and what did not and why."""
    if recorder := config.pluginmanager.get_plugin("costs"):
        costs = importlib.import_module("tests.support.costs")
        seconds = terminalreporter._session_start.elapsed().seconds
        costs.write(pathlib.Path(config.getoption("--costs")), recorder, seconds)
    stats = terminalreporter.stats
    outcomes = ("passed", "failed", "xfailed", "xpassed")
    ran = sum(len(stats.get(outcome, ())) for outcome in outcomes)
    reasons: dict[str, int] = {}
    for report in stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    parts = [f"{ran} ran, {sum(reasons.values())} skipped"]
    parts += [f"{count} skipped: {reason}" for reason, count in sorted(reasons.items())]
    if left_out := _deselected.get("choice", 0):
        parts.append(f"{left_out} left out by -m '{config.option.markexpr}' or -k")
    if left_out := _deselected.get("verticals", 0):
        parts.append(f"{left_out} of verticals left out: make test-all")
    seconds = terminalreporter._session_start.elapsed().seconds
    parts.append(f"{seconds // 60:.0f} min {seconds % 60:.0f} s")
    terminalreporter.write_line("tests: " + "; ".join(parts))
