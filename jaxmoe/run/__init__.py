# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A training run as a library object: configuration, assembly, directory, training, report."""

from jaxmoe.generation.text import Sample as Sample
from jaxmoe.run.results import EvaluateResult as EvaluateResult
from jaxmoe.run.results import TrainedStep as TrainedStep
from jaxmoe.run.results import TrainResult as TrainResult
from jaxmoe.run.run import Run as Run
