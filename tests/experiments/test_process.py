# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What an entry point does to its process."""

import ast
import asyncio
import contextlib
import errno
import io
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments import serve as serve_command
from experiments.cli import exit as exit_module
from experiments.cli import flags
from experiments.cli.exit import bounded_exit
from experiments.cli.exit_codes import ExitCode
from experiments.cli.launcher import VARIABLE as LAUNCHER
from experiments.cli.launcher import watch_launcher
from experiments.cli.output import write
from experiments.cli.process import (
    check_xla_flags,
    configure_logging,
    end_at_once,
    end_unsaved,
    has_tpu,
)
from experiments.launch.config import LaunchConfig
from experiments.launch.signals import Signals
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.console import LastingStream
from jaxmoe.tracking.terminal import open_console


def test_warnings_are_plain_words_whoever_was_here_first(monkeypatch):
    stream = io.StringIO()
    first = logging.StreamHandler(stream)
    first.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    monkeypatch.setattr(logging.root, "handlers", [first])
    configure_logging()
    logging.getLogger("jaxmoe.anywhere").warning("careful")
    assert stream.getvalue() == "WARNING: careful\n"


def test_commands_are_silent_about_libtpu_where_no_tpu_is():
    pytest.importorskip("libtpu", reason="its warnings need libtpu: pip install 'jaxmoe[plan]'")
    if has_tpu():
        pytest.skip("this machine has a TPU")
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS" and "TPU" not in k}
    program = "from experiments.cli.process import start_process; start_process()"
    root = pathlib.Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", program], env=kept, cwd=root, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is an allocator of Linux")
def test_memory_of_a_compilation_returns_and_that_of_a_step_stays():
    """64 MB that a process has freed below something that it holds."""
    program = """
import ctypes
import jax
from experiments.cli import process

assert process.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(2**20))) for _ in range(65)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)

def resident():
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * 4096 // 2**20

sizes = [resident()]
for block in blocks[:-1]:
    libc.free(block)
sizes.append(resident())
for seconds in (0.1, 30.0):
    jax.monitoring.record_event_duration_secs(process._COMPILED, seconds)
    sizes.append(resident())
print(*sizes)
"""
    root = pathlib.Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    before, freed, short, long = map(int, output.split())
    assert before - 4 <= freed <= before and before - 4 <= short <= before
    assert long < before - 60


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"dev/accel0": ""}, True),
        ({"dev/vfio/vfio": ""}, False),
        ({"dev/vfio/0": ""}, True),
        (
            {"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/class": "0x0200"},
            False,
        ),
        (
            {"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/class": "0x0880"},
            True,
        ),
        ({"sys/bus/pci/devices/0/vendor": "0x1ae0\n"}, True),
        (
            {"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x03"},
            False,
        ),
    ],
)
def test_a_tpu_is_never_overlooked(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert has_tpu(tmp_path) is expected


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_a_run_with_a_code_that_claims_no_save(monkeypatch, capfd, second):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with StopRequest(on_second=end_unsaved):
        signal.raise_signal(signal.SIGTERM)
        assert codes == []
        signal.raise_signal(second)
    assert codes == [ExitCode.NOT_SAVED]
    assert f"{second.name} came again: ended at once, without a save" in capfd.readouterr().err
    end_at_once(second)
    assert codes[1:] == [128 + second], "a server saves nothing"


# A save or a compilation, in which Python handles no signal.
_IN_NATIVE_CODE = """
import hashlib
from experiments.cli.process import end_unsaved
from jaxmoe.resilience.stop import StopRequest

with StopRequest(lambda reason: None, end_unsaved) as stop:
    stop.steps_begin()
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def test_second_signal_ends_a_run_in_native_code_at_once():
    command = [sys.executable, "-c", _IN_NATIVE_CODE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == ExitCode.NOT_SAVED
        finally:
            process.kill()


@pytest.fixture
def heeds_sighup():
    """As from a terminal; under `nohup` the signal is ignored, and stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_like_sigterm_and_counts_once(heeds_sighup):
    seen = []
    with StopRequest(on_second=seen.append) as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # by the kernel, after the shell
        assert stop.reason == "preempted" and seen == []
        signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]


def _heard_by_a_server(monkeypatch, *numbers):
    """How often a server drains, and with which codes it ends at once."""
    drains, codes = [], []
    monkeypatch.setattr(os, "_exit", codes.append)

    async def serve():
        loop = asyncio.get_running_loop()
        serve_command.heed_signals(loop, lambda: drains.append(True))
        for number in numbers:
            signal.raise_signal(number)
            await asyncio.sleep(0.02)

    asyncio.run(serve())
    return len(drains), codes


def test_a_server_drains_when_its_terminal_is_closed(heeds_sighup, monkeypatch):
    hup, term = signal.SIGHUP, signal.SIGTERM
    assert _heard_by_a_server(monkeypatch, hup) == (1, [])
    assert _heard_by_a_server(monkeypatch, hup, hup) == (1, []), "by the kernel, after the shell"
    assert _heard_by_a_server(monkeypatch, term, hup) == (1, [])
    assert _heard_by_a_server(monkeypatch, hup, term) == (1, [128 + term])
    assert _heard_by_a_server(monkeypatch, term, signal.SIGINT) == (1, [128 + signal.SIGINT])
    signal.signal(hup, signal.SIG_IGN)
    assert _heard_by_a_server(monkeypatch, hup) == (0, []), "started with nohup"


def test_a_process_that_ignores_sighup_still_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop, Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason is None and signals.number is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


_LAUNCHED = """
import signal, sys, time
from experiments.cli.launcher import watch_launcher
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
assert watch_launcher() is not None
print("ready", flush=True)
time.sleep(600)
"""
_LAUNCHER = """
import os, subprocess, sys, time
from experiments.cli.launcher import LauncherLife
with LauncherLife() as life:
    process = subprocess.Popen(
        ["bash", "-c", 'exec "$@"', "-", sys.executable, "-c", *sys.argv[2:]],
        env=os.environ | life.environment(sys.argv[1]), pass_fds=(life.descriptor,),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    assert process.stdout.readline() == "ready\\n"
    print(process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("ends", ["killed", "stopped"])
@pytest.mark.parametrize("hangup", ["SIG_DFL", "SIG_IGN"])
def test_a_process_stops_when_its_launcher_is_killed_and_says_why(tmp_path, hangup, ends):
    """And not while the launcher is only held; its words go to the log that has no other writer."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", _LAUNCHER, str(log), _LAUNCHED, hangup]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            process = os.pidfd_open(int(launcher.stdout.readline()))
            if ends == "stopped":
                launcher.send_signal(signal.SIGSTOP)
                assert not select.select([process], [], [], 0.5)[0]
            launcher.kill()
            assert select.select([process], [], [], 10)[0]
        finally:
            launcher.kill()
    os.close(process)
    assert log.read_text() == "error: the launcher of this process has ended: stopping\n"


def test_a_process_without_a_launcher_watches_none(monkeypatch, tmp_path):
    monkeypatch.delenv(LAUNCHER, raising=False)
    assert watch_launcher() is None
    with open(os.devnull) as file:  # a program between closed the pipe, and has another file there
        for text in (f"{file.fileno()} 1 {tmp_path}", "many 1 log", "", "987654 1 log"):
            monkeypatch.setenv(LAUNCHER, text)
            assert watch_launcher() is None


def test_an_unknown_flag_in_xla_flags_is_named(monkeypatch):
    known = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    for good in ("", known, "flags_in_a_file"):
        monkeypatch.setenv("XLA_FLAGS", good)
        check_xla_flags()
    monkeypatch.setenv("XLA_FLAGS", f"{known} --xla_no_such_flag=1")
    with pytest.raises(ValueError, match="^XLA_FLAGS has --xla_no_such_flag, which the XLA of"):
        check_xla_flags()


def test_an_exit_that_a_thread_holds_is_ended_with_its_name(monkeypatch):
    errors, codes, is_ended, is_held = io.StringIO(), [], threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "__stderr__", errors)
    monkeypatch.setattr(
        exit_module, "leave_at_once", lambda code: (codes.append(code), is_ended.set())
    )
    holder = threading.Thread(target=is_held.wait, name="a save that never ends")
    holder.start()
    try:
        with pytest.raises(SystemExit), bounded_exit(0.01):
            sys.exit(74)
        assert is_ended.wait(10)
    finally:
        is_held.set()
    assert codes == [74] and "a save that never ends" in errors.getvalue()
    assert "it ends now, with exit code 74" in errors.getvalue()


ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("experiments/*.py"), *ROOT.glob("experiments/*/__main__.py"))
    if '__name__ == "__main__"' in path.read_text()
)
COMMANDS.remove("experiments/__main__.py")  # runs one of the others, which ends so


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_a_bounded_exit(path):
    """Its last statement runs it through `run_command`."""
    last = ast.parse((ROOT / path).read_text()).body[-1]
    assert isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"
    (ends,) = last.body
    assert isinstance(ends, ast.Expr) and ast.unparse(ends).startswith("run_command(")


def test_every_thread_has_a_name():
    """A process that cannot exit reports the names of the threads that hold it."""
    keyword = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix"}
    found = 0
    for package in ("experiments", "jaxmoe", "sharding", "pallas_kernels"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
                if name in keyword:
                    found += 1
                    given = {word.arg for word in node.keywords}
                    assert keyword[name] in given, f"{path}:{node.lineno}: a thread without a name"
    assert found > 5


@pytest.mark.slow
@pytest.mark.parametrize("held", ["thread", "library"])
def test_a_command_that_cannot_exit_is_ended(held):
    """A thread that never ends costs a minute, and native code four more; here less."""
    program = f"""
import ctypes, threading
from experiments.cli import exit
exit.EXIT_SECONDS, exit._TEARDOWN = 0.5, 0.5

class Library:
    def __del__(self, sleep=ctypes.PyDLL(None).sleep):
        sleep(600)  # with the lock of the interpreter

def main(argv):
    if {held!r} == "thread":
        threading.Thread(target=threading.Event().wait, name="a write that never ends").start()
    else:
        globals()["library"] = Library()
    return 74

exit.run_command(main)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if held == "thread":
        assert ended.returncode == 74 and "because of a write that never ends" in ended.stderr
    else:
        assert ended.returncode == -signal.SIGALRM


@contextlib.contextmanager
def _full_stdout(monkeypatch):
    """Standard output on a full disk; its last flush must not raise."""
    with open("/dev/full", "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        yield


def test_output_to_a_full_disk_is_one_warning(monkeypatch, caplog):
    with _full_stdout(monkeypatch):
        write("lost")
        write("lost as well")  # to the null device by now
    assert [record.getMessage() for record in caplog.records] == [
        "standard output cannot be written (No space left on device): the command continues"
        " without it"
    ]


def test_help_to_a_full_disk_ends_in_order(monkeypatch):
    with _full_stdout(monkeypatch), pytest.raises(SystemExit) as stopped:
        flags.parse_flags(LaunchConfig(), ["--help"], "prog", "about")
    assert stopped.value.code == 0


def test_progress_to_a_full_disk_is_dropped(caplog):
    stream = open("/dev/full", "w")
    lasting = LastingStream(stream)
    for _ in range(2):
        lasting.write("step=1")
        lasting.flush()
    assert caplog.text.count("standard output cannot be written (No space left on device)") == 1
    with pytest.raises(OSError, match="No space left"):
        stream.close()


def test_closed_standard_streams_are_the_null_device(tmp_path):
    script = (
        "import sys; from experiments.cli.output import open_closed_streams, write\n"
        "open_closed_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); assert file.fileno() > 2\n"
        "write('lost'); print('lost'); print('lost', file=sys.stderr); print('kept', file=file)"
    )
    ended = subprocess.run(["bash", "-c", 'exec "$@" >&- 2>&-', "-", sys.executable, "-c", script])
    assert ended.returncode == 0 and (tmp_path / "file").read_text() == "kept\n"


def test_a_console_without_standard_output_is_silent(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    open_console("auto", 10).start(0)


def test_an_error_is_reported_by_its_exit_code_without_standard_error(monkeypatch):
    with open("/dev/full", "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(SystemExit) as stopped:
            flags.fail("lost")
        assert stopped.value.code == flags.ExitCode.BAD_CONFIGURATION
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the rest of its buffer


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EROFS, "is not writable: change its permissions"),
        (errno.EFBIG, "needs a larger file than the limit of this process: see ulimit -f"),
    ],
)
def test_errors_of_storage_are_one_sentence(tmp_path, number, text):
    with (
        pytest.raises(ValueError, match=f"^run.directory={tmp_path} {text}, or choose another"),
        RunDirectory(tmp_path).usable(),
    ):
        raise OSError(number, os.strerror(number))
