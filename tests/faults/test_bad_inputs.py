# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bad inputs, one row each: what is given, and the message of the refusal.

Each message names the place (a dotted path, a file or an array), the value, what is allowed and,
unless obvious, what to do. All of them come before the first step, most of them before anything is
compiled. COMMANDS are flags of `python -m experiments.pretrain`, which ends with 2 and the message
on stderr; CALLS are calls of the library, which raise.

Where names or choices differ from the literature, those of this library are tested: the last of
repeated flags counts, -1 fills an axis, batches of training never end (epochs follow one another),
and a failed save is reported and the run goes on. What needs several processes (hosts whose configs
differ) or a hostile checkpoint has tests of its own.

To add a row: a line in COMMANDS or CALLS.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pretrain
from experiments.cli import flags as cli
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe import load_checkpoint, save_checkpoint
from jaxmoe.checkpoint import CheckpointDamagedError, CheckpointError, CheckpointManager
from jaxmoe.data import Batch, DataError, FilesConfig, Loader, MarkovConfig, Row, check_position
from jaxmoe.data.batch import validate_batch
from jaxmoe.data.loader import check_claims
from jaxmoe.data.synthetic import SyntheticSource
from jaxmoe.data.tokenizer import IdsConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.restore import Continuation
from sharding.rules import DATA_PARALLEL
from tests.support.runs import ROOT, flags


def mesh(**sizes):
    """Flags of a mesh; sizes that are not given are 1."""
    every = {"data": 1, **sizes}
    return [word for axis, n in every.items() for word in (f"--execution.mesh.{axis}", str(n))]


COMMANDS = {
    "an unknown field": (
        ["--optimizer.learning_rte", "0.1"],
        r"no flag --optimizer\.learning_rte: did you mean --optimizer\.learning_rate\?",
    ),
    "an unknown recipe": (["tinny"], r"unknown recipe 'tinny'.*did you mean 'tiny'.*recipes: "),
    "an unknown member": (
        ["model.moe.router:softmax_top"],
        r"model\.moe\.router: has no 'softmax_top': did you mean 'softmax_topk'.*choices: ",
    ),
    "a word for a number": (
        ["--training.steps", "many"],
        r"--training\.steps: invalid literal for int\(\) with base 10: 'many'",
    ),
    "a negative learning rate": (
        ["--optimizer.learning_rate", "-1"],
        r"optimizer\.learning_rate=-1\.0 must be above 0",
    ),
    "a learning rate that is no number": (
        ["--optimizer.learning_rate", "nan"],
        r"optimizer\.learning_rate=nan must be above 0, and finite",
    ),
    "b1 of 1.5": (["--optimizer.beta1", "1.5"], r"optimizer\.beta1=1\.5 must lie in \[0, 1\)"),
    "b2 of 1": (["--optimizer.beta2", "1"], r"optimizer\.beta2=1\.0 must lie in \[0, 1\)"),
    "no epsilon": (["--optimizer.epsilon", "0"], r"optimizer\.epsilon=0\.0 must be above 0"),
    "an endless weight decay": (
        ["--optimizer.weight_decay", "inf"],
        r"optimizer\.weight_decay=inf must be 0 or more, and finite",
    ),
    "clip of 0": (
        ["--training.clip", "0"],
        r"training\.clip=0\.0 must be above 0, or None not to clip",
    ),
    "a negative clip": (
        ["--training.clip", "-1"],
        r"training\.clip=-1\.0 must be above 0, or None not to clip",
    ),
    "a warm-up longer than the run": (
        ["--schedule.warmup_steps", "9"],
        r"schedule\.warmup_steps=9 must be at most 3, below .* steps \(4\): .*training\.steps",
    ),
    "a dtype that is none": (
        ["--execution.precision.compute", "bf61"],
        r"'bf61' for argument '--execution\.precision\.compute'\. Expected one of \('auto',"
        r" 'float32', 'bfloat16'\)",
    ),
    "few bits where there is no such form": (
        ["markov", "model.attention:latent", "execution.precision.matmul:halo"],
        r"execution\.precision\.matmul=halo is not for latent attention, .*: set it to full",
    ),
    "top_k above the experts": (
        ["--model.moe.top_k", "5", "--model.moe.num_experts", "4"],
        r"moe\.top_k=5 must not exceed moe\.num_experts=4",
    ),
    "top_k of 0": (["--model.moe.top_k", "0"], r"moe\.top_k=0 must be above 0"),
    "no capacity": (
        [
            "execution.dispatcher:all_to_all_dropping",
            "--execution.dispatcher.capacity_factor",
            "0",
        ],
        r"execution\.dispatcher\.capacity_factor=0\.0 must be a positive",
    ),
    "heads that do not divide": (
        ["--model.attention.num_heads", "3", "--model.attention.num_kv_heads", "2"],
        r"attention\.num_heads=3 must be a multiple of attention\.num_kv_heads=2",
    ),
    "an odd head": (
        ["--model.attention.head_dim", "15"],
        r"attention\.head_dim=15 must be even: RoPE turns pairs",
    ),
    "rows of one token": (
        ["--training.sequence_length", "1"],
        r"training\.sequence_length=1 must be at least 2",
    ),
    "batches of nothing": (
        ["--training.batch_size", "0"],
        r"training\.batch_size=0 must be at least 1",
    ),
    "micro-batches that do not divide": (
        ["--training.accumulation", "3"],
        r"training\.batch_size=8 must be divisible by .* training\.accumulation=3: choose a"
        r" multiple of 24",
    ),
    "keeping one checkpoint": (
        ["--checkpoint.keep", "1"],
        r"checkpoint\.keep=1 must be at least 2: the last may be unfinished",
    ),
    "a vocabulary smaller than the data's": (
        ["--model.vocab_size", "4"],
        r"model\.vocab_size=4 is smaller than the vocabulary of the data \(\d+ token ids\): give"
        r" --model\.vocab_size \d+",
    ),
    "no path": (["data:files"], r"data\.path is empty: give files, globs or directories after it"),
    "a path that is not there": (
        ["data:files", "--data.path", "nowhere/*.txt"],
        r"data\.path=nowhere/\*\.txt matches no file \(from /.*\): check it, and quote globs",
    ),
    "a mesh of 16 for 8 devices": (
        mesh(data=4, tensor=4),
        r"mesh \(data=4 x tensor=4\) needs 16 devices, there are 8: choose sizes whose product is"
        r" 8, or set one axis to -1",
    ),
    "a mesh of 6 for 8 devices": (
        mesh(data=3, tensor=2),
        r"mesh \(data=3 x tensor=2\) needs 6 devices, there are 8: choose sizes whose product is 8",
    ),
    "-1 that nothing fills": (
        mesh(data=-1, tensor=3),
        r"mesh \(data=-1 x tensor=3\) needs a multiple of 3 devices, there are 8: choose sizes that"
        r" divide 8",
    ),
    "two axes of -1": (mesh(data=-1, tensor=-1), r"only one mesh axis may be -1"),
    "an axis of 0": (mesh(data=0), r"mesh\.data=0 must be at least 1, or -1 for the remaining"),
    "an unknown axis": (
        mesh(tensr=2),
        r"no flag --execution\.mesh\.tensr: did you mean --execution\.mesh\.tensor\?",
    ),
    "chunks without stages": (
        [*mesh(data=8), "--execution.pipeline.chunks", "2"],
        r"execution\.pipeline\.chunks=2 cuts .* and execution\.mesh\.stage=1 has one: set",
    ),
    "stages that do not divide the vocabulary": (
        [*mesh(stage=2, data=4), "--model.num_layers", "2", "--model.vocab_size", "17"],
        r"17 .*must be divisible by .*stage.* 2",
    ),
    "stages and rows": (
        [*mesh(stage=2, data=4), "--model.num_layers", "2", "--training.accumulation", "4"],
        r"training\.batch_size=8 must be divisible by the 4 devices .* choose a multiple of 16",
    ),
    "comparisons of gradients on stages": (
        [*mesh(stage=2, data=4), "--model.num_layers", "2", "--gradient_comparison.every", "3"],
        r"parts:gradient_comparison compares .* execution\.mesh\.stage=2 .* out of parts",
    ),
    "stages": (
        mesh(stage=8),
        r"equal layers of moe_blocks_0 must be divisible by execution\.mesh\.stage x"
        r" execution\.pipeline\.chunks = 8, the number of equal groups",
    ),
    "experts that do not divide": (
        ["--model.moe.num_experts", "6", *mesh(expert=4, data=2)],
        r"'experts' of size 6 must be divisible by mesh\.expert=4: set model\.moe\.num_experts to a"
        r" multiple of 4 or mesh\.expert to 1, 2 or 3",
    ),
    "a batch that does not divide": (
        ["--training.batch_size", "6", *mesh(data=8)],
        r"training\.batch_size=6 must be divisible by the 8 devices .*: choose a multiple of 8",
    ),
    "more tensor parallelism than key heads": (
        [
            "--model.attention.num_heads",
            "8",
            "--model.attention.num_kv_heads",
            "2",
            *mesh(tensor=8),
        ],
        r"'kv_heads' of size 2 must be divisible by mesh\.tensor=8: set"
        r" model\.attention\.num_kv_heads to a multiple of 8 or mesh\.tensor to 1 or 2",
    ),
    "positions that do not divide": (
        ["--training.sequence_length", "20", "execution.sequence_parallel:ring", *mesh(seq=8)],
        r"training\.sequence_length: .* of size 20 must be divisible by mesh\.seq=8: choose a"
        r" multiple of 8",
    ),
    "heads fewer than the devices of ulysses": (
        ["execution.sequence_parallel:ulysses", *mesh(seq=8)],
        r"ulysses.*attention\.num_heads=1.*mesh\.seq=8.*set mesh\.seq to 1, or .* to ring",
    ),
    "rows cut without a form": (
        mesh(data=2, seq=4),
        r"mesh\.seq=4 needs a sequence-parallel attention.*set execution\.mesh\.seq to 1, or",
    ),
}


def command_fails(capsys, arguments):
    """Return the command's stderr as one line, without tyro's box."""
    with pytest.raises(SystemExit) as stopped:
        pretrain.main(arguments)
    assert stopped.value.code == cli.ExitCode.BAD_CONFIGURATION
    printed = re.sub(r"[\u2500-\u257f]", " ", capsys.readouterr().err)
    assert "Traceback" not in printed
    return " ".join(printed.split())


@pytest.fixture
def never_trains(monkeypatch):
    def start(*_, **__):
        pytest.fail("the first state was reached")

    monkeypatch.setattr(Continuation, "restore_or_start", start)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_refuses(name, tmp_path, capsys, never_trains):
    more, words = COMMANDS[name]
    arguments = flags(tmp_path / "run", 4, *more)
    if not more[0].startswith("-") and ":" not in more[0]:
        arguments = more
    assert re.search(words, command_fails(capsys, arguments))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_table_can_fail(tmp_path, capsys, never_trains):
    """A valid command reaches the first state, so its row would fail."""
    with pytest.raises(pytest.fail.Exception, match="the first state was reached"):
        command_fails(capsys, flags(tmp_path / "run", 4))


def test_an_unknown_platform(tmp_path):
    """In a process of its own, since JAX chooses a platform once."""
    environment = {**os.environ, "JAX_PLATFORMS": "tpuv9", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "experiments.pretrain", *flags(tmp_path / "run", 4)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == cli.ExitCode.BAD_CONFIGURATION
    assert re.fullmatch(
        r"error: JAX_PLATFORMS=tpuv9 cannot be used: .*tpuv9.*: set JAX_PLATFORMS=cpu, or unset"
        r" it.*\n",
        ended.stderr,
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return the directory of a run that has begun."""
    directory = RunDirectory(tmp_path_factory.mktemp("runs") / "run")
    words = flags(directory.path, 4)
    directory.acquire()
    directory.check_config(cli.parse(RECIPES, DEFAULT, words, "test", "")[1])
    directory.release()
    return directory.path


RESUMED = {
    "another seed": (["--training.seed", "7"], r"training\.seed: saved 0, given 7"),
    "other data": (["--data.order", "3"], r"data\.order: saved 2, given 3"),
    "another batch": (["--training.batch_size", "16"], r"training\.batch_size: saved 8, given 16"),
    "another model": (["--model.embed_dim", "32"], r"model\.embed_dim: saved 16, given 32"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_with_another_config_is_refused(name, begun, capsys, never_trains):
    more, words = RESUMED[name]
    said = command_fails(capsys, flags(begun, 4, *more))
    assert re.search(
        rf"run\.directory=\S+ belongs to a run with another config: {words}.* choose another"
        r" directory with --run\.directory",
        said,
    )


def test_directory_in_use_is_refused(begun, capsys, never_trains):
    held = RunDirectory(begun)
    held.acquire()
    said = command_fails(capsys, flags(begun, 4))
    held.release()
    assert re.search(
        rf"run\.directory=\S+ is in use by process {os.getpid()} on \S+ \(since .*\): wait", said
    )


def batch_of(tokens, **others):
    tokens = np.asarray(tokens)
    ones = np.ones(tokens.shape, np.float32)
    return Batch(**{"tokens": tokens, "targets": tokens, "loss_weights": ones, **others})


def checked(values, dtype=np.int32, **others):
    """Return a call that validates a batch of one row, for a vocabulary of 256."""
    return lambda _: validate_batch(batch_of(np.array([values], dtype), **others), 256)


def read(name, content, **fields):
    """Return a call that reads one user file."""

    def call(place):
        path = place / name
        path.write_bytes(content)
        return FilesConfig(path=(str(path),), cache=str(place / "cache"), **fields).build()

    return call


def ids(values, dtype="<u2", vocab_size=256):
    """Return a call that reads a file of token ids."""
    return read(
        "shard.bin", np.array(values, dtype).tobytes(), tokenizer=IdsConfig(vocab_size=vocab_size)
    )


def npy_of_floats(place):
    np.save(place / "shard.npy", np.zeros(64, np.float32))
    config = FilesConfig(
        path=(str(place / "shard.npy"),), tokenizer=IdsConfig(), cache=str(place / "cache")
    )
    return config.build()


def cut_npy(place):
    np.save(place / "shard.npy", np.zeros(64, np.uint16))
    content = (place / "shard.npy").read_bytes()
    return read("shard.npy", content[:-6], tokenizer=IdsConfig())(place)


MARKOV = MarkovConfig()
CHAINS = MARKOV.build().chains


class Padding(SyntheticSource):
    """A source whose rows are all padding."""

    def row(self, split, index, sequence_length, *, epoch=0):
        zeros = np.zeros(sequence_length + 1, np.int32)
        return Row(tokens=zeros, segment_ids=zeros)


def loader(**changes):
    given = {"source": MARKOV.build(), "batch_size": 4, "sequence_length": 8, "seed": 0}
    return Loader(**{**given, **changes})


def resumed(source, other):
    """Return a call that resumes with another loader than the checkpoint's."""
    return lambda place: check_position(source(place).position(3), other(place).position(3))


def text_loader(text, **fields):
    def build(place):
        fields.setdefault("validation_fraction", 0.2)
        source = read("text.txt", text, **fields)(place)
        return Loader(source, batch_size=2, sequence_length=8, seed=0)

    return build


def id_loader(vocab_size):
    def build(place):
        source = ids(range(200), vocab_size=vocab_size)(place)
        return Loader(source, batch_size=2, sequence_length=8, seed=0)

    return build


TEXT = b"the quick brown fox jumps over the lazy dog, and " * 40


def claims(*rows):
    """Return a call that compares the parts that hosts read: part, number of parts, hash."""
    return lambda _: check_claims(np.array(rows, np.int32))


DATA = {
    "a token past the vocabulary": (
        checked([1, 2, 256]),
        r"batch\.tokens\[row 0, position 2\] is 256, outside the vocabulary of 256 \(ids 0 to 255\)"
        r": use the tokenizer that",
    ),
    "a negative token": (
        checked([1, -1]),
        r"batch\.tokens\[row 0, position 1\] is -1, outside the",
    ),
    "uint16 of another tokenizer": (checked([40000], np.uint16), r"position 0\] is 40000, outside"),
    "int64 that wraps to 1": (
        checked([2**32 + 1], np.int64),
        r"position 0\] is 4294967297, outside",
    ),
    "float tokens": (
        checked([1.0], np.float32),
        r"batch\.tokens has dtype float32, which must be an integer type: convert it where it is",
    ),
    "a target past the vocabulary": (
        checked([1, 2], targets=np.array([[1, 300]])),
        r"batch\.targets\[row 0, position 1\] is 300, outside the vocabulary of 256",
    ),
    "a negative weight": (
        checked([1, 2], loss_weights=np.array([[1.0, -1.0]])),
        r"batch\.loss_weights\[row 0, position 1\] is -1\.0, which must be finite and not negative",
    ),
    "targets of another shape": (
        checked([1, 2], targets=np.array([[1]])),
        r"batch\.targets has shape \(1, 1\), which must be that of batch\.tokens, \(1, 2\)",
    ),
    "a batch of masked tokens alone": (
        lambda _: loader(source=Padding(config=MARKOV, seed=0, chains=CHAINS)).batch(0),
        r"train batch 0 has 32 predictions, and the loss weight of each is 0 .*: there is nothing"
        r" to learn from it\. Pack the rows, or leave such rows out",
    ),
    "a file with a token past the vocabulary": (
        ids([5, 6, 300, 7]),
        r"shard\.bin.*: token id 300 at position 2 of the file is outside the vocabulary of 256 .*:"
        r" give the tokenizer that made the file .*--data\.tokenizer\.vocab_size N",
    ),
    "an empty file": (read("text.txt", b""), r"text\.txt holds no text: found only empty"),
    "an empty directory": (
        lambda place: FilesConfig(path=(str(place),)).build(),
        r"data\.path=\S+ holds no text \(from .*\): check it",
    ),
    "fewer rows than a batch": (
        lambda place: Loader(
            read("text.txt", TEXT)(place), batch_size=1000, sequence_length=8, seed=0
        ),
        r"the train split has \d+ rows of sequence_length=8, and batch_size=1000 must be at most"
        r" that: lower one of them \(--training\.sequence_length, --training\.batch_size\), or"
        r" bring more data",
    ),
    "a shard cut in an id": (
        read("shard.bin", b"\1\0\2\0\3", tokenizer=IdsConfig()),
        r"shard\.bin has 5 bytes, not a multiple of the 2 of uint16: it is truncated, or of another"
        r" type \(--data\.bin_dtype\)",
    ),
    "a shard cut in its array": (
        cut_npy,
        r"shard\.npy ends at byte \d+: its 64 ids of uint16 need \d+ bytes\. .* copy it again",
    ),
    "a shard of floats": (
        npy_of_floats,
        r"shard\.npy holds float32: expected integers, the ids of",
    ),
    "a compressed shard cut short": (
        read("text.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9]),
        r"text\.jsonl\.gz ends at byte \d+ in the middle of its compressed content .*: .*copy it",
    ),
    "a record that is none": (
        read("text.jsonl", b'{"text": "a"}\n{"txt": "b"}\n'),
        r"text\.jsonl.*2.*'text'.*\(--data\.on_bad_record skip leaves such records out\)",
    ),
    "a shard that cannot be opened": (
        lambda place: FilesConfig(path=("/proc/self/mem",), cache=str(place)).build(),
        r"/proc/self/mem cannot be read: Input/output error",
    ),
    "the end of what is held out": (
        lambda place: Loader(
            read("text.txt", TEXT, validation_fraction=0.2)(place),
            **{"batch_size": 2, "sequence_length": 8, "seed": 0, "split": "validation"},
        ).batch(10**6),
        r"validation batch 1000000 does not exist: the split has \d+ rows of sequence_length=8, \d+"
        r" batches of 2\. Ask for fewer batches",
    ),
    "resumed with another seed": (
        resumed(lambda _: loader(), lambda _: loader(seed=1)),
        r"trained on other data:\s+seed: 0 in the checkpoint, 1 now\s+Give the same data, seed",
    ),
    "resumed with another batch": (
        resumed(lambda _: loader(), lambda _: loader(batch_size=8)),
        r"batch_size: 4 in the checkpoint, 8 now",
    ),
    "resumed with a file that has changed": (
        resumed(text_loader(TEXT), text_loader(TEXT[:-9] + b"and so on")),
        r"source\.train\.files\.text\.txt: \d+ bytes, sha256 \w+ in the checkpoint, .* now",
    ),
    "resumed with another tokenizer": (
        resumed(id_loader(256), id_loader(300)),
        r"source\.tokenizer\.vocab_size: 256 in the checkpoint, 300 now",
    ),
    "resumed with another packing": (
        resumed(text_loader(TEXT), text_loader(TEXT, packing="concatenate")),
        r"source\.packing: best_fit in the checkpoint, concatenate now",
    ),
    "two hosts that read one part": (
        claims((0, 2, 7, 7), (0, 2, 7, 7)),
        r"hosts \[0, 1\] all read part 0 of every batch, and part 1 of 2 is read by 0: give each"
        r" host its own process_index",
    ),
    "hosts that read other data": (
        claims((0, 2, 7, 7), (1, 2, 7, 8)),
        r"host 1 reads other data than host 0 .*: copy the same files to all",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data_is_refused(name, tmp_path):
    call, words = DATA[name]
    with pytest.raises(DataError) as refused:
        call(tmp_path)
    assert re.search(words, str(refused.value), re.DOTALL), str(refused.value)


STATE = {"up_kernel": np.arange(12.0, dtype=np.float32).reshape(3, 4), "step": np.int32(2)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("kept")
    for step in (1, 2):
        save_checkpoint(directory, STATE, step=step, config={})
    return directory


def restored(target, step=2):
    return lambda place: load_checkpoint(place, step=step, target=target)


def _largest(place, step=2):
    files = (path for path in (place / str(step) / "state").rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def flipped(place):
    content = bytearray(_largest(place).read_bytes())
    content[len(content) // 2] ^= 1
    _largest(place).write_bytes(content)
    load_checkpoint(place, step=2)


def truncated(place):
    os.truncate(_largest(place), 3)
    load_checkpoint(place, step=2)


def missing_file(place):
    _largest(place).unlink()
    load_checkpoint(place, step=2)


def linked(place):
    file = _largest(place)
    file.rename(place / "elsewhere")
    file.symlink_to(place / "elsewhere")
    load_checkpoint(place, step=2)


def half_deleted(place):
    shutil.rmtree(place / "2" / "manifest")
    assert CheckpointManager(place, is_writer=False).steps() == [1]
    load_checkpoint(place, step=2)


def newer(place):
    path = place / "2" / "manifest" / "metadata"
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 99'))
    load_checkpoint(place, step=2, verify="off")


CHECKPOINTS = {
    "no such step": (
        restored(None, step=7),
        CheckpointError,
        r"\S+ has no checkpoint of step 7 \(has: 1, 2\)",
    ),
    "an empty directory": (
        lambda place: load_checkpoint((place / "new").mkdir() or place / "new"),
        CheckpointError,
        r"/new holds no checkpoints",
    ),
    "a directory that is not there": (
        lambda place: load_checkpoint(place / "nowhere"),
        CheckpointError,
        r"/nowhere holds no checkpoints: the directory does not exist",
    ),
    "a parameter that is missing": (
        restored({**STATE, "gate": STATE["up_kernel"]}),
        CheckpointError,
        r"/2 holds another state than the target \(1 arrays differ\):\s+gate: not in the"
        r" checkpoint\s+restore it with the model and optimizer it was saved with",
    ),
    "a parameter left over": (
        restored({"up_kernel": STATE["up_kernel"]}),
        CheckpointError,
        r"step: in the checkpoint, not in the target",
    ),
    "a parameter that was renamed": (
        restored({"up_kernels": STATE["up_kernel"], "step": STATE["step"]}),
        CheckpointError,
        r"up_kernel: in the checkpoint, not in the target\s+up_kernels: not in the checkpoint"
        r" \(it has up_kernel\)",
    ),
    "another shape": (
        restored({**STATE, "up_kernel": STATE["up_kernel"].T}),
        CheckpointError,
        r"up_kernel: saved float32\[3,4\], wanted float32\[4,3\]",
    ),
    "another dtype": (
        restored({**STATE, "up_kernel": STATE["up_kernel"].astype(jnp.bfloat16)}),
        CheckpointError,
        r"up_kernel: saved float32\[3,4\], wanted bfloat16\[3,4\]",
    ),
    "a flipped bit": (
        flipped,
        CheckpointDamagedError,
        r"/2 is damaged: state/\S+: its content has changed \(\d+ bytes\)",
    ),
    "a file cut short": (
        truncated,
        CheckpointDamagedError,
        r"/2 is damaged: state/\S+: .*3.* bytes",
    ),
    "a file that is gone": (missing_file, CheckpointDamagedError, r"/2 is damaged: state/\S+: "),
    "a link": (
        linked,
        CheckpointDamagedError,
        r"state/\S+: a link, which checkpoints do not contain",
    ),
    "a step that is half deleted": (half_deleted, CheckpointError, r"of step 2 \(has: 1\)"),
    "a name with a dot": (
        lambda place: save_checkpoint(place, {"a.b": STATE["up_kernel"]}, step=3, config={}),
        ValueError,
        r"the name 'a\.b' in .* cannot be saved: names must not be empty, nor hold '/' or '\.'",
    ),
    "a newer jaxmoe's": (
        newer,
        CheckpointError,
        r"/2 has schema 99, this jaxmoe knows \d+: install a newer jaxmoe",
    ),
    "a step that exists": (
        lambda place: save_checkpoint(place, STATE, step=2, config={}),
        CheckpointError,
        r"already has a checkpoint of step 2",
    ),
    "one checkpoint kept": (
        lambda place: CheckpointManager(place, keep=1),
        ValueError,
        r"keep=1 must be at least 2: the last may be unfinished",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_are_refused(name, kept, tmp_path):
    call, error, words = CHECKPOINTS[name]
    shutil.copytree(kept, tmp_path / "copy")
    with pytest.raises(error) as refused:
        call(tmp_path / "copy")
    assert re.search(words, str(refused.value)), str(refused.value)
    assert str(tmp_path / "copy") in str(refused.value) or error is ValueError


def test_a_full_disk(kept, tmp_path, monkeypatch, caplog):
    """The run goes on, and the log names the file that was not saved."""
    usage = types.SimpleNamespace(total=10**6, used=10**6 - 10, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    manager = CheckpointManager(tmp_path)
    assert not manager.save(5, STATE, config={})
    manager.close()
    assert re.search(
        r"the checkpoint of step 5 was not saved, .*: 0\.0 MB are free, about .* MB are needed",
        caplog.text,
    )


def test_a_place_that_cannot_be_written(tmp_path, capsys, never_trains):
    (tmp_path / "file").write_text("")
    said = command_fails(capsys, flags(tmp_path / "file" / "run", 4))
    assert re.search(r"run\.directory=\S+ cannot be used \(Not a directory.*--run\.directory", said)


def test_two_dimensions_on_one_axis():
    words = r"logical axes 'heads' and 'mlp' of one array both use the mesh axis 'tensor': give"
    with pytest.raises(ValueError, match=words):
        DATA_PARALLEL.resolve(("heads", "mlp"))
    with pytest.raises(ValueError, match=r"'headz' is no logical axis: did you mean 'heads'\?"):
        DATA_PARALLEL.resolve(("headz",))
