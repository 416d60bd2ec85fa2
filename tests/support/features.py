# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of each row of the page of features, and records that it did.

    python -m tests.support.features [--only PATTERN] [--new] [--part 1/2] [--record]

A row holds if its commands end with 0 and the runs that they train have the choices and values that
the row names. `--record` writes `tests/features_checked.json`; rows that do not hold are printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import re
import shlex
import tempfile
import zlib
from typing import Any

from tests.support.documented import Ended, run_all
from tests.support.source_tree import ROOT

PAGE = ROOT / ".docs" / "features.md"
RECORD = ROOT / "tests" / "features_checked.json"
ROW = re.compile(r"^\| (?!feature |---)(.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
CHOICE = re.compile(r"([a-z][a-z_.0-9]*):([a-z0-9_]+)$")
TRAINING = ("pretrain", "finetune", "rl")

_STAGES = ("--execution.mesh.stage", "2", "--execution.mesh.data", "-1")
_STAGES += ("--training.accumulation", "2")
_FOUR = ("--model.num_layers", "4")
_NEEDS: dict[str, tuple[str, ...]] = {
    "--training.skipping.groups 4 --training.batch_size 64 --training.accumulation 8": _FOUR,
    "--execution.mesh.stage 4 --training.accumulation 2 --training.skipping.ratio 0"
    " --training.skipping.order swapped_ends": _FOUR,
    "execution.pipeline:gpipe": _STAGES,
    "--execution.pipeline.chunks 2": (*_STAGES, *_FOUR),
    "--execution.pipeline.weight_gradients deferred": _STAGES,
    "execution.sequence_parallel:ulysses": ("--execution.mesh.seq", "4"),
    "execution.dispatcher:all_gather": ("--execution.mesh.expert", "4"),
    "--training.batch_ramp.stages 3": (
        *("--training.batch_ramp.fraction", "0.5"),
        *("--training.steps", "6"),
    ),
    "--profile.steps 10:13": ("--training.steps", "14"),
    "replicas:streaming": ("--execution.mesh.replica", "4"),
    "replicas:sparse": ("--replicas.workers", "4", "--training.batch_size", "32"),
    "data:mixture": ("--data.mix", "web=0.7:web/*.parquet", "code=0.3:src"),
    "data:chat": ("--data.path", "chats.jsonl"),
    "jaxmoe ensemble": ("--runs", "runs/parts/1", "runs/parts/2"),
    "jaxmoe checkpoint convert --to_huggingface auto": ("--to", "exported"),
    "jaxmoe checkpoint convert --to_huggingface peft": (
        *("--run.directory", "TUNED"),
        *("--to", "exported"),
    ),
    "jaxmoe generate --chat True": ("--run.directory", "TUNED"),
    "jaxmoe launch cluster:jobset": (
        *("--cluster.image", "IMAGE", "--cluster.volume_claim", "CLAIM"),
        *("--command", "jaxmoe pretrain --run.directory /runs/d16"),
    ),
    "jaxmoe launch cluster:tpu_vm": (
        *("--cluster.zone", "us-central1-a"),
        *("--command", "jaxmoe pretrain --run.directory /mnt/runs/d16"),
    ),
    "jaxmoe checkpoint convert --from_huggingface DIR": ("--to", "imported"),
    "jaxmoe checkpoint reshard --keep params": ("--to", "resharded"),
}
"""Flags that a row leaves to its reader."""

_FIRST: dict[str, tuple[str, ...]] = {
    "jaxmoe ensemble": (
        "jaxmoe pretrain --data.partition.part 1/2 --run.directory runs/parts/1",
        "jaxmoe pretrain --data.partition.part 2/2 --run.directory runs/parts/2",
    ),
    "jaxmoe finetune RUN-w4a16": ("jaxmoe checkpoint convert RUN --quantise w4a16",),
}
"""Commands that make what a row speaks of, before its own."""


def commands_of(evidence: str) -> list[str]:
    """Return the command lines of a row; flags alone are those of pretrain, as the page says.

    Args:
        evidence: Last cell of the row.
    """
    found = []
    for code in re.findall(r"`([^`]+)`", evidence):
        first = code.split()[0]
        if first == "jaxmoe":
            found.append(code)
        elif first.startswith("--") or CHOICE.match(first):
            found.append(f"jaxmoe pretrain {code}")
    return found


def rows() -> dict[str, list[str]]:
    """Return the commands of each row that has some, by the name of the feature."""
    table = ROW.findall(PAGE.read_text(encoding="utf-8"))
    found = {name: commands_of(evidence) for name, _, evidence in table}
    return {name: commands for name, commands in found.items() if commands}


def place_of(command: str) -> str:
    """Return the directory of the run that a command may make."""
    return f"runs/rows/{zlib.crc32(command.encode()):08x}"


def further(command: str, place: str) -> tuple[str, ...]:
    """Return the flags with which a command of a row is run.

    Args:
        command: Command line.
        place: Directory of the run that it may make.
    """
    bare = command.removeprefix("jaxmoe pretrain ")
    flags = _NEEDS.get(command, _NEEDS.get(bare, ()))
    if "--fold_bits" in command:  # of what the row has fine-tuned before
        flags = ("--run.directory", place_of("jaxmoe finetune model.adapter:quantised_choices"))
    name = command.split()[1]
    makes_run = name in (*TRAINING, "routers", "transfer", "launch") and "--islands" not in command
    return (*flags, "--run.directory", place) if makes_run else flags


def unmet(command: str, config: dict[str, Any]) -> list[str]:
    """Return the words of a command that its run does not have.

    Args:
        command: Command line.
        config: Content of the run's config.json.
    """
    missing, flag = [], ""
    for word in shlex.split(command)[2:]:
        if word.startswith("--"):
            flag = word[2:]
        elif match := CHOICE.match(word):
            value = _at(config, match[1])
            kind = value.get("kind") if isinstance(value, dict) else value
            if kind != match[2]:
                missing.append(f"{word} is {kind}")
        elif flag:
            value = _at(config, flag)
            shown = [each.get("kind") if isinstance(each, dict) else each for each in _list(value)]
            if not {word, word.partition(":")[0]} & {*map(_written, shown)}:
                missing.append(f"--{flag} {word} is {shown}")
    return missing


def _written(value: Any) -> str:
    """Return a value as a command has it: 30.0 as 30."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _at(config: Any, path: str) -> Any:
    """Return the value of a field; a part of a run is found by its kind."""
    kind, _, rest = path.partition(".")
    for part in config.get("parts", ()) if kind not in config else ():
        if part["kind"] == kind:
            config, path = part, rest
    for name in path.split("."):
        if isinstance(config, list):
            config = config[int(name)] if name.isdigit() else None
        elif isinstance(config, dict):
            config = config.get(name)
    return config


def fault(command: str, ended: Ended, place: pathlib.Path) -> str | None:
    """Return why a row does not hold, if it does not.

    Args:
        command: Command line of the row.
        ended: How it has ended.
        place: Directory of its run.
    """
    if ended.code:
        last = [line for line in ended.text.splitlines() if line.strip()]
        return f"exit code {ended.code}: {' / '.join(last[-3:])}"
    if command.split()[1] not in TRAINING:
        return None
    missing = unmet(command, json.loads((place / "config.json").read_text(encoding="utf-8")))
    if (place / "profile").is_dir():  # what is traced is no part of a run's configuration
        missing = [words for words in missing if not words.startswith("--profile.")]
    return "; ".join(missing) or None


def check(wanted: dict[str, list[str]], folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Run the commands of rows; return for each row its commands, seconds and faults.

    Args:
        wanted: Commands by row.
        folder: Empty folder.
    """
    lines = dict.fromkeys(command for commands in wanted.values() for command in commands)
    places = {line: place_of(line) for line in lines}
    asked: dict[str, list[str]] = {}
    for line, place in places.items():
        asked |= {first: [first] for first in _FIRST.get(line, ())}
        asked[line] = [line, *further(line, place)]
    ends = dict(zip(asked, run_all(folder, [*asked.values()]), strict=True))
    found: dict[str, dict[str, Any]] = {}
    for name, commands in wanted.items():
        faults = [
            f"{command}: {words}"
            for command in commands
            if (words := fault(command, ends[command], folder / places[command])) is not None
        ]
        seconds = round(sum(ends[command].seconds for command in commands), 1)
        found[name] = {"commands": commands, "seconds": seconds, "faults": faults}
    return found


def write_record(record: dict[str, Any]) -> None:
    """Write the rows that hold, and their number and date on the page."""
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    last = max(row["date"] for row in record.values())
    sentence = f"The commands of {len(record)} rows were run until {last}"
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"The commands of \d+ rows were run until \S+?(?=,)", sentence, text))


def main() -> None:
    """Run rows, print those that do not hold, and record the others."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="rows whose name or commands match this pattern")
    parser.add_argument("--new", action="store_true", help="rows that are not recorded")
    parser.add_argument("--part", default="1/1", help="part of the rows, such as 1/2")
    parser.add_argument("--folder", help="empty folder, or one of an earlier call")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    recorded = json.loads(RECORD.read_text()) if options.new and RECORD.exists() else {}
    chosen = [
        (name, commands)
        for name, commands in rows().items()
        if any(re.search(options.only, words) for words in (name, *commands))
    ][part - 1 :: parts]
    chosen = [row for row in chosen if row[1] != recorded.get(row[0], {}).get("commands")]
    folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix="features-"))
    folder.mkdir(exist_ok=True)
    found = check(dict(chosen), folder)
    faults = [words for row in found.values() for words in row["faults"]]
    seconds = sum(row["seconds"] for row in found.values())
    print("\n".join(faults))
    print(f"{len(found)} rows, {len(faults)} faults, {seconds:.0f} s; results in {folder}")
    if options.record:
        date = datetime.date.today().isoformat()
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record |= {
            name: {"date": date, "commands": row["commands"], "seconds": row["seconds"]}
            for name, row in found.items()
            if not row["faults"]
        }
        write_record({name: record[name] for name in rows() if name in record})


if __name__ == "__main__":
    main()
