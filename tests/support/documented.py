# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs commands of the documentation as they stand, in a folder with what its pages speak of.

    place = Place(folder)               runs, models, texts and chats, all small
    place.run("jaxmoe evaluate RUN")    its exit code, and what it printed

A command keeps its words; behind them come flags that make it small. Most run in this process, one
after the other, on its devices; servers and launchers are processes. RUN, DIR, TUNED and other
names in capitals are what pages call the reader's own: here they are files of these names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import io
import json
import logging
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator

import httpx2 as httpx

from jaxmoe.run.reporting import finish
from tests.support.documented_files import write_models, write_texts
from tests.support.small_flags import MASKED, small
from tests.support.source_tree import ROOT

SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shell_lines(text: str) -> list[str]:
    """Return the command lines of the shell blocks of a page, continued lines joined."""
    blocks = "\n".join(SHELL.findall(text))
    lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def environment(devices: int = 1, **variables: str) -> dict[str, str]:
    """Return the environment of a command, as after `source .venv/bin/activate`.

    Args:
        devices: Devices of the CPU that it finds.
        **variables: Further variables.
    """
    places = (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))
    # XLA compiles in a third of the time without its newer emitters of fusions.
    flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    flags = f"--xla_force_host_platform_device_count={devices} {flags}"
    return {
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "NPROC": "32",  # threads: interpreted kernels wait for each other on several devices
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "python"),
        **os.environ,
        "PATH": os.pathsep.join(places),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
        **variables,
    }


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    text: str
    """Standard output and error."""
    seconds: float


class Place:
    """A folder with the files, runs and models that pages speak of."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._address: str | None = None
        self._server = "jaxmoe serve"

    def prepare(self) -> None:
        """Write texts and models, and train the runs that pages speak of."""
        write_texts(self.folder)
        write_models(self.folder)
        for command, copies in _RUNS.items():
            ended = self.run(command)
            assert ended.code == 0, (command, ended.text[-3000:])
            path = re.search(r"\S*(runs/[\w/-]+)/report\.html", ended.text)
            source = self.folder / (path[1] if path else copies[0])
            for name in copies:
                if not (self.folder / name).exists():
                    shutil.copytree(source, self.folder / name)

    def run(self, line: str, more: tuple[str, ...] = ()) -> Ended:
        """Run a command with flags that make it small.

        Args:
            line: The command line.
            more: Further flags behind it.
        """
        words = self._meant(shlex.split(line, comments=True))
        _free_targets(self.folder, [*words, *more])
        start = time.monotonic()
        try:
            code, text = self._start(line, words, more)
        except (AssertionError, OSError, httpx.HTTPError, subprocess.SubprocessError):
            code, text = 1, traceback.format_exc()
        if "--check" in words and code == 1 and "a quantity passes where" in text:
            code = 0  # the verdict of a check, as its page says; on so few steps it may be either
        return Ended(code, text, time.monotonic() - start)

    def _meant(self, words: list[str]) -> list[str]:
        """Return a command with the run that it means: a page's RUN is more than one thing."""
        for sign, (name, command) in _MEANT.items():
            if sign in words and name in words:
                made = shlex.split(command)[-1]
                if not (self.folder / made).exists():
                    ended = self.run(command)
                    assert ended.code == 0, (command, ended.text[-3000:])
                words = [made if word == name else word for word in words]
        return words

    def _start(self, line: str, words: list[str], more: tuple[str, ...]) -> tuple[int, str]:
        """Run a command in the way that it needs."""
        if words[0] == "curl" or words[1:3] == ["serving", "load"]:
            server = shlex.split(self._server, comments=True)
            devices = 8 if words[0] == "curl" else 1
            with self.serving([*server, *small(server)], devices) as (_, lines):
                assert self._address is not None
                words = [word.replace("http://127.0.0.1:8000", self._address) for word in words]
                if words[0] == "curl":
                    return _ask(words)
                code, text = self._call([*words, *more, *small(words, more)])
            return code, "".join(lines) + text
        if words[0] != "jaxmoe" or "|" in words:
            return self._shell(line)
        words += [*more, *small(words, more)]
        if words[1] == "serve":
            self._server = line
            return self._serve(words)
        if words[1] == "launch" and {"--supervise", "--islands"} & {*words}:
            return self._launch(words)
        if words[1] == "resize":
            with self._training(words[words.index("--run.directory") + 1]):
                return self._call(words)
        if words[1] == "replay":
            refuses = ("--training.guard.max_norm_ratio", "1.0001", "--training.steps", "12")
            refuses += ("--training.guard.max_skipped", "1", "--optimizer.learning_rate", "1")
            with self._aside("RUN"):
                self.run("jaxmoe pretrain --run.directory RUN", refuses)
                return self._call(words)
        return self._call(words)

    def _shell(self, line: str) -> tuple[int, str]:
        """Run a line of the shell: variables before a command, or a pipe behind it."""
        command, pipe, behind = line.partition(" | ")
        words = shlex.split(command, comments=True)
        flags = small(words[words.index("jaxmoe") :])
        whole = f"{command} {shlex.join(flags)}{pipe}{behind}"
        return self._process(["bash", "-c", f"set -o pipefail; {whole}"])

    def _process(self, words: list[str], devices: int = 8) -> tuple[int, str]:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=environment(devices),
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout + done.stderr

    @contextlib.contextmanager
    def _aside(self, name: str) -> Iterator[None]:
        """Move a run aside within, for another one in its place."""
        path, aside = self.folder / name, self.folder / "aside"
        path.rename(aside)
        try:
            yield
        finally:
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)

    @contextlib.contextmanager
    def _training(self, name: str) -> Iterator[None]:
        """Let a run train on eight devices within."""
        words = ["jaxmoe", "pretrain", "--run.directory", name, "--execution.mesh.data", "8"]
        more = ("--training.batch_size", "24", "--training.steps", "100000")
        words += [*more, *small(words, more)]
        with self._aside(name), contextlib.ExitStack() as stack:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=environment(8),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            metrics = self.folder / name / "metrics.jsonl"
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.2)
            yield

    def _call(self, words: list[str]) -> tuple[int, str]:
        """Call the function of a command in this process."""
        name = f"experiments.{words[1]}"
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"no command {words[1]}"
        module = f"{name}.__main__" if spec.submodule_search_locations else name
        main = importlib.import_module(module).main
        printed, code = io.StringIO(), 0
        handler = logging.StreamHandler(printed)  # of warnings
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, sys, "stdin", sys.stdin)
            sys.stdin = io.StringIO("1+5=\n")
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(printed))
            stack.callback(logging.root.removeHandler, handler)
            logging.root.addHandler(handler)
            try:
                code = main(words[2:])
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except Exception:
                traceback.print_exc()
                code = 1
        return int(code), printed.getvalue()

    def _launch(self, words: list[str]) -> tuple[int, str]:
        """Start a launcher whose processes train what is small."""
        at = words.index("--command") + 1 if "--command" in words else len(words)
        inner = shlex.split(words[at]) if at < len(words) else []
        if inner in (["..."], []):
            inner = ["jaxmoe", "pretrain", "--run.directory", "runs/pretrain/four"]
            inner += ["replicas:diloco"] if "--islands" in words else []
        words = [*words[:at], shlex.join([*inner, *small(inner)]), *words[at + 1 :]]
        if "--command" not in words:
            words.insert(at, "--command")
        return self._process(words, devices=1)

    def _serve(self, words: list[str]) -> tuple[int, str]:
        """Start a server, ask it for text, and end it."""
        # Experts on more devices need some to grow to; a model of masked diffusion reads numbers.
        devices = 8 if "engine.scaling:elastic_experts" in words else 1
        prompt = "0 1" if MASKED & {*words} else "def "
        with self.serving(words, devices) as (server, lines):
            address = self._address
            body = {"prompt": prompt, "max_tokens": 2}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=240)
            lines.append(f"asked for a completion: {answer.status_code} {answer.text}\n")
        code = 0 if answer.status_code == 200 else 1
        return server.returncode or code, "".join(lines)

    @contextlib.contextmanager
    def serving(
        self, words: list[str], devices: int = 1
    ) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
        """Run a server within, to which addresses of commands lead.

        Args:
            words: The command, with its flags.
            devices: Devices that it finds.

        Yields:
            The process, and the lines that it has printed.
        """
        server = subprocess.Popen(
            words,
            cwd=self.folder,
            env=environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines: list[str] = []
        with server, contextlib.ExitStack() as stack:
            stack.callback(server.send_signal, signal.SIGINT)
            assert server.stdout is not None
            for line in iter(server.stdout.readline, ""):
                lines.append(line)
                if line.startswith("next: "):
                    break
            found = re.search(r"http://[\d.]+:\d+", lines[-1] if lines else "")
            assert found is not None, "".join(lines)[-3000:]
            self._address = found[0]
            stack.callback(setattr, self, "_address", None)
            yield server, lines


def _ask(words: list[str]) -> tuple[int, str]:
    """Send the request of a line of curl."""
    if "-d" in words:
        body = words[words.index("-d") + 1]
        answer = httpx.post(words[1], content=body, timeout=240)
    else:
        answer = httpx.get(words[1], timeout=240)
    return int(answer.status_code != 200), answer.text


_RUNS = {
    "jaxmoe pretrain --evaluation.batches 2": ("runs/pretrain/tiny", "RUN", "BASE", "FINETUNED"),
    "jaxmoe finetune BASE data:chat --data.path chats.jsonl --run.name chats": (
        "TUNED",
        "OTHER",
        "RUN1",
        "RUN2",
    ),
}
"""Commands that make runs, and names under which pages speak of them."""


_DIFFUSION = ("RUN", "jaxmoe pretrain diffusion --run.directory DIFFUSION")
_DRAFTING = (
    "jaxmoe pretrain training.objective:multi_token_prediction model.options:options"
    " model.options.predictor:multi_token_prediction --run.directory DRAFTING"
)
_MEANT = {
    "--engine.logit_budget": _DIFFUSION,
    "--engine.steps_per_token": _DIFFUSION,
    "0 1": _DIFFUSION,
    "imported.predictor:multi_token_prediction": ("DIR", "PUBLISHED"),
    "--drafts": ("runs/pretrain/tiny", _DRAFTING),
}
"""By a word of a command: the name in it, and what makes, or is, the directory that is meant."""


def _free_targets(folder: pathlib.Path, words: list[str]) -> None:
    """Remove what stands where a command is to write: a page says DIR for more than one thing."""
    for flag, word in zip(words, words[1:], strict=False):
        target = folder / word
        if flag in ("--to", "--into") and target.is_dir():
            shutil.rmtree(target)
        elif flag == "--tables":
            target.unlink(missing_ok=True)


def run_all(folder: pathlib.Path, commands: list[list[str]]) -> list[Ended]:
    """Run commands in a process for each number of devices: first those for one, then meshes.

    Args:
        folder: Empty folder.
        commands: Command lines, each with further flags.

    Returns:
        How each has ended.

    Raises:
        RuntimeError: A process has ended before its commands.
    """
    found: dict[int, Ended] = {}
    for devices in (1, 4, 8):
        chosen = [i for i, words in enumerate(commands) if _devices(" ".join(words)) == devices]
        results = folder / f"results_{devices}.jsonl"
        words = [sys.executable, "-m", "tests.support.documented", str(folder), str(results)]
        if not (folder / "runs").exists():
            words.append("prepare")
        elif not chosen:
            continue
        process = subprocess.run(
            words,
            input=json.dumps([commands[number] for number in chosen]),
            env=environment(devices, HF_HOME=str(folder / "cache")),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        lines = results.read_text().splitlines() if results.exists() else []
        if process.returncode or len(lines) != len(chosen):
            ended = f"{len(lines)} of {len(chosen)} have ended"
            raise RuntimeError(f"{ended}\n{process.stdout[-2000:]}{process.stderr[-4000:]}")
        ends = [Ended(**json.loads(line)) for line in lines]
        found |= dict(zip(chosen, ends, strict=True))
    return [found[number] for number in range(len(commands))]


def _devices(command: str) -> int:
    """Return the number of devices in the process of a command: tables are for four."""
    if "token_tables" in command:
        return 4
    return 8 if re.search(r"execution\.|mesh\.|replicas:|doctor|levels", command) else 1


def main(folder: pathlib.Path, results: pathlib.Path, *, prepares: bool) -> None:
    """Run the commands of standard input; append to a file how each has ended.

    Args:
        folder: Folder of the commands.
        results: The file.
        prepares: Whether the folder is empty yet.
    """
    gc.set_threshold(200_000, 50, 1000)  # tracing makes and drops many small objects
    commands = json.load(sys.stdin)
    place = Place(folder)
    os.chdir(folder)
    if prepares:
        place.prepare()
    # Pictures and the page of a run take a third of the time of a small one: those of the runs that
    # have just been made are enough.
    for name in ("plot_run", "write_run_report"):
        setattr(finish, name, lambda *arguments, **options: None)
    with results.open("w", encoding="utf-8") as file:
        for line, *more in commands:
            ended = place.run(line, tuple(more))
            file.write(json.dumps(dataclasses.asdict(ended)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), prepares="prepare" in sys.argv)
