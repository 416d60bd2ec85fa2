# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Run`: a training run as an object, for notebooks and scripts.

from experiments import recipes
from jaxmoe.run import Run

run = Run(recipes.tiny(steps=200), directory="runs/mine")
run.train()
run.evaluate()
run.generate("def ")
run.report()
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint.huggingface.hub import is_huggingface, model_directory
from jaxmoe.configs import differences, to_json
from jaxmoe.data import Source, SourceKind
from jaxmoe.errors import ConfigurationError, configuration_errors
from jaxmoe.generation.text import (
    GenerationConfig,
    LoadedModel,
    OnSample,
    continue_texts,
    encode_prompts,
)
from jaxmoe.messages import TEXT_FILES, say, show_messages
from jaxmoe.models.decode import MakePrograms
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import FIXED_FIELDS, FREE_FIELDS, PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.fitting import fit_to_data
from jaxmoe.run.load import describe_precision, restore_run
from jaxmoe.run.measures import ReadingResult, decoding, measure_reading
from jaxmoe.run.provenance.saved import Ends as Ends
from jaxmoe.run.provenance.saved import at_execution, end_ids, on_data, on_task, saved_config
from jaxmoe.run.provenance.warm_start import with_initial_step
from jaxmoe.run.reporter import EvaluateResult, TrainedStep, TrainResult
from jaxmoe.run.reporting.recorded import read_run
from jaxmoe.run.reporting.report import rebuild_report
from jaxmoe.run.supervision import Supervision, close_at_exit, library_supervision
from jaxmoe.run.trainer import Trainer
from jaxmoe.serve.offline import continue_together
from jaxmoe.tracking.jsonl import Series, read_metrics
from jaxmoe.training.evaluate import evaluate, make_eval_step
from jaxmoe.training.state import TrainState
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import WHOLE_CACHE, CacheFormat, CacheReading


class Run:
    """A training run and its directory. Creating one touches neither a device nor a file.

    Args:
        config: Configuration of the run, such as a recipe of `experiments.recipes` returns.
        directory: Run directory; `config.run.directory` or runs/pretrain/<name> when None. A run
            that is there already is resumed, if its configuration is the same.
        name: Name in messages and trackers; `config.run.name` or the directory's when None.
        extends: Whether a run that is there may go on with changed `EXTENSION_FIELDS`, such as more
            steps, another schedule or another learning rate; lineage.json records it. A set names
            the fields that are chosen where a checkpoint has others than config.json.
        fixed_fields: Dotted paths of the fields that the user has set. With them, `train` fits
            sizes that are not among them to the data (`jaxmoe.run.fitting`) and says so; None
            leaves every field as it is.
    """

    def __init__(
        self,
        config: PretrainConfig,
        directory: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        extends: bool | frozenset[str] = False,
        fixed_fields: frozenset[str] | None = None,
    ):
        if directory is not None:
            run = dataclasses.replace(config.run, directory=os.fspath(directory))
            config = dataclasses.replace(config, run=run)
        name = name or config.run.name
        self.config = config
        """Configuration of the run."""
        self.directory = RunDirectory(config.run.directory or f"runs/pretrain/{name or 'run'}")
        """Files of the run."""
        self.name = name or self.directory.path.name
        """Name of the run in messages and trackers."""
        self.result: TrainResult | None = None
        """How the latest call of `train` or `steps` ended; None before."""
        self._loaded: LoadedRun | None = None
        self._extends = extends
        self._fixed_fields = fixed_fields
        self._has_own_data = True
        self._is_on_host = False

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        mesh: MeshConfig | None = None,
        cache: CacheFormat = "compute",
        data: SourceKind | None = None,
        sequence_length: int | None = None,
        batches: int | None = None,
        initial: str | None = None,
        is_on_host: bool = False,
    ) -> Run:
        """Open a finished or interrupted run by its directory.

        Args:
            directory: Run directory; or directory, or name on the hub, of a Hugging Face model.
            mesh: Mesh to use; the one of the run when None.
            cache: Format of cached keys and values, of `evaluate` and `generate`.
            data: Held-out data of `evaluate`, in the tokens of the run; its own when None.
            sequence_length: Tokens of a held-out sequence; those of a training row when None.
            batches: Number of held-out batches; that of the run when None.
            initial: Model that the adapter of the run was trained on, where it has moved.
            is_on_host: Whether to load into host memory, for a mesh of one device.

        Raises:
            ConfigurationError: There is no run, or `cache` or `data` does not fit the model.
        """
        with configuration_errors():
            path = model_directory(directory, "run.directory")
            saved = saved_config(path, initial)
            config = on_data(saved, RunDirectory(path), data, sequence_length, batches)
            run = cls(at_execution(config, path, mesh, cache), path)
        run._has_own_data = config == saved
        run._is_on_host = is_on_host
        return run

    def train(self, supervision: Supervision | None = None) -> TrainResult:
        """Train to the last step, or resume an interrupted run.

        Ctrl-C and SIGTERM save the state and end the call with the status "interrupted" or
        "preempted"; the next call resumes.

        Args:
            supervision: Watchdog, signals and resources of a command that owns its process; None
                in a notebook or a script.

        Raises:
            ConfigurationError: The configuration, the directory or the data cannot be used.
            MissingPackageError: A tracker's package is not installed.
        """
        if supervision is None:
            with self._own_supervision() as run_supervision:
                return self.train(run_supervision)
        trainer = self._trainer(supervision)
        for _ in trainer.steps():
            pass
        self.result = trainer.result
        assert self.result is not None  # the steps have ended
        return self.result

    def steps(self) -> Generator[TrainedStep, None, None]:
        """Train like `train`, and yield every step to a loop of the caller's.

        Evaluation, checkpoints and reports happen as configured. Leaving the loop early saves the
        state, so that `train` or another loop resumes after the last step yielded; so does the end
        of a program whose main thread called this. `result` holds how the loop ended.

        Raises:
            ConfigurationError: The configuration, the directory or the data cannot be used.
            MissingPackageError: A tracker's package is not installed.
        """
        steps = self._train_by_step()
        close_at_exit(steps)
        return steps

    def _train_by_step(self) -> Generator[TrainedStep, None, None]:
        """Yield the steps of one loop, and set `result` at its end."""
        with self._own_supervision() as supervision:
            trainer = self._trainer(supervision)
            try:
                yield from trainer.steps()
            finally:
                self.result = trainer.result

    def evaluate(self, *, step: int | None = None) -> EvaluateResult:
        """Compute the held-out loss of a checkpoint, bitwise the number that training logged.

        Args:
            step: Step of the checkpoint; the newest when None.

        Raises:
            ConfigurationError: There is no such checkpoint.
        """
        with self.restore(step) as loaded:
            assembly = loaded.assembly
            state = loaded.state
            eval_step = make_eval_step(
                assembly.plan.model,
                execution=assembly.execution,
                objective=assembly.plan.config.training.objective,
            )
            held_out = evaluate(eval_step, state.params, state.router_state, assembly.held_out())
        bits = held_out.bits_per_token
        per_token = assembly.source.bytes_per_token
        return EvaluateResult(
            step=loaded.step,
            num_tokens=held_out.num_tokens,
            bits_per_token=bits,
            bits_per_byte=None if per_token is None else bits / per_token,
            precision=describe_precision(assembly),
        )

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...] | np.ndarray,
        *,
        length: int = 300,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        eos: Ends = "auto",
        eos_ids: Sequence[int] = (),
        step: int | None = None,
        reading: CacheReading = WHOLE_CACHE,
        on_sample: OnSample | None = None,
        programs: MakePrograms | None = None,
        task: str | None = None,
    ) -> Any:
        """Continue a text, or several together, on one device.

        Args:
            prompt: Text to continue, several of any lengths, or token ids [S].
            length: Largest number of tokens to generate.
            temperature: Divisor of the logits; 0 takes the most likely token.
            top_k: Number of most likely tokens to choose from; all when None.
            top_p: Probability that the most likely tokens to choose from have together.
            min_p: Smallest probability to choose from, divided by the largest.
            seed: Seed of the sampling; of several prompts the i-th has seed + i.
            stop: Strings that end a text, which is cut before them.
            eos: Whether the end-of-text token ends a text: stop, ignore, or auto, which stops for
                Hugging Face models, runs that began from one, and those imported without data of
                their own.
            eos_ids: Further token ids that end a text.
            step: Step of the checkpoint; the newest when None.
            reading: Part of the cache that a generated token attends to.
            on_sample: Called with the sample of a single prompt as its text grows.
            programs: Makes the programs, see `jaxmoe.models.decode.HostPrograms`.
            task: Part of data.mix, by name or number, whose adapter is used; its own when None.

        Returns:
            A sample, or a list of them for several prompts.

        Raises:
            ConfigurationError: An argument is out of range, a prompt cannot be encoded, or there is
                no such checkpoint.
        """
        with configuration_errors():
            law = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            config = GenerationConfig(length=length, sampling=law, seed=seed, stop=tuple(stop))
            loaded = self._load(step, needs_data=False)
            assembly = loaded.assembly
            source = loaded.assembly.source
            texts: Any = [prompt] if isinstance(prompt, str | np.ndarray) else prompt
            prompts = texts if isinstance(prompt, np.ndarray) else encode_prompts(source, texts)
            ends = (*end_ids(self.directory, self.config, source, eos), *eos_ids)
            config = dataclasses.replace(config, eos_ids=ends)
            execution, precision = decoding(assembly, reading, prompts, length)
            model = LoadedModel(
                config=on_task(assembly.plan.model, self.config.data, task),
                params=jax.device_get(loaded.state.params),
                router_state=jax.device_get(loaded.state.router_state),
                execution=execution,
                programs=programs,
            )
            if len(prompts) == 1 or on_sample is not None or programs is not None:
                samples = continue_texts(
                    model, source, prompts, config, on_sample=on_sample, precision=precision
                )
            else:
                samples = continue_together(model, source, prompts, config, precision=precision)
        return samples[0] if isinstance(prompt, str | np.ndarray) else samples

    @property
    def text_source(self) -> Source:
        """Source whose tokens the model has; reads a checkpoint and no data."""
        return self._load(None, needs_data=False).assembly.source

    def measure_reading(self, reading: CacheReading, *, step: int | None = None) -> ReadingResult:
        """Compute the held-out loss of decoded tokens that attend to a part of the cache.

        Args:
            reading: Part of the cache that is read.
            step: Step of the checkpoint; the newest when None.

        Raises:
            ConfigurationError: There is no such checkpoint, or the model or the data do not fit.
        """
        with self.restore(step) as loaded, configuration_errors():
            return measure_reading(loaded.assembly, loaded.state, loaded.step, reading)

    def report(self) -> pathlib.Path:
        """Draw the plots and write report.html anew from the files of the run.

        Returns:
            The path of report.html; the plots are PNG files in `directory.plots_directory`.

        Raises:
            ConfigurationError: There is no run with metrics.
        """
        return rebuild_report(read_run(self.directory.path))

    def metrics(self) -> Series:
        """Return the logged metrics: arrays of steps and values by name, such as "train/loss"."""
        return read_metrics(self.directory.metrics_file)

    def summary(self) -> dict[str, Any] | None:
        """Return the content of summary.json; None while the run has not ended."""
        return self.directory.summary()

    def _trainer(self, supervision: Supervision) -> Trainer:
        self._loaded = None
        with configuration_errors():
            source = self._fit_to_data()
            saved = self.directory.config_json() if self.directory.has_config() else None
            self.config = with_initial_step(self.config, saved)
        return Trainer(
            self.name,
            self.config,
            self.directory,
            supervision,
            extends=self._extends,
            source=source,
        )

    def _fit_to_data(self) -> Source | None:
        """Fit sizes that the user has not set to the data, and return the data; None without."""
        config = self.config
        if self._fixed_fields is None or not config.data.traits.has_rows:
            return None
        saved = self.directory.config_json() if self.directory.has_config() else None
        source: Source = config.data.build(config.training.seed)
        mesh = config.execution.mesh
        # A mesh that does not fit the devices is refused later, unless a part chooses among them.
        with contextlib.suppress(ValueError):
            mesh = mesh.resolve(jax.device_count())
        shards = abs(mesh.batch_shards)  # of free axes at least 1
        self.config, texts = fit_to_data(
            config, source, self._fixed_fields, batch_shards=shards, saved=saved
        )
        for text in texts:
            say(f"note: {text}")
        return source

    @contextlib.contextmanager
    def _own_supervision(self) -> Generator[Supervision, None, None]:
        shows = self.config.tracking.console != "none"
        with (
            show_messages() if shows else contextlib.nullcontext(),
            library_supervision(self.config.timeouts) as supervision,
        ):
            yield supervision

    def _load(self, step: int | None, *, needs_data: bool) -> LoadedRun:
        """Return the state of a checkpoint, kept on the devices until training or another step."""
        loaded = self._loaded
        is_it = loaded is not None and (loaded.is_newest if step is None else loaded.step == step)
        if loaded is None or not is_it or (needs_data and not loaded.has_data):
            self._loaded = None
            with configuration_errors():
                loaded = self._restore(step, needs_data)
            self._loaded = loaded
        return loaded

    def _restore(self, step: int | None, needs_data: bool) -> LoadedRun:
        if self._has_own_data and not is_huggingface(self.directory.path):
            saved = self.directory.config_json()
            if lines := differences(saved, to_json(self.config), FREE_FIELDS, FIXED_FIELDS):
                raise ValueError(
                    f"run.directory={self.directory.path} belongs to a run with another config:\n  "
                    + "\n  ".join(lines)
                )
        assembly, state, manifest = restore_run(
            self.config,
            self.directory,
            step,
            needs_data=needs_data,
            has_own_data=self._has_own_data,
            devices=jax.local_devices(backend="cpu")[:1] if self._is_on_host else None,
        )
        options = {"is_newest": step is None, "has_data": needs_data}
        return LoadedRun(assembly=assembly, state=state, step=manifest, **options)

    @contextlib.contextmanager
    def restore(self, step: int | None = None) -> Generator[LoadedRun, None, None]:
        """Restore a checkpoint for measurements of one's own, on the mesh of the run.

        Args:
            step: Step of the checkpoint; the newest when None.

        Raises:
            ConfigurationError: There is no such checkpoint, or the run has no data.
        """
        if not self.config.data.traits.has_rows:
            raise ConfigurationError(
                f"run.directory={self.directory.path} holds a model without data of its own: give"
                f" held-out data, such as {TEXT_FILES}"
            )
        loaded = self._load(step, needs_data=True)
        execution = loaded.assembly.execution
        if not execution.precision.has_floating_weights:
            weights = execution.precision.weights
            with configuration_errors():
                execution.check_one_stage(
                    f"run.directory={self.directory.path} holds weights={weights}, of whole models"
                )
        with jax.set_mesh(loaded.assembly.mesh):
            yield loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run on devices with the state of one checkpoint."""

    assembly: Assembly
    state: TrainState
    step: int
    is_newest: bool
    has_data: bool
    """Whether rows can be read."""
