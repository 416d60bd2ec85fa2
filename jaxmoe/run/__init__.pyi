# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.generation.text import Sample as Sample
from jaxmoe.run.reporter import check_packages as check_packages
from jaxmoe.run.results import EvaluateResult as EvaluateResult
from jaxmoe.run.results import TrainedStep as TrainedStep
from jaxmoe.run.results import TrainResult as TrainResult
from jaxmoe.run.run import Run as Run
from jaxmoe.run.supervision import Supervision as Supervision
