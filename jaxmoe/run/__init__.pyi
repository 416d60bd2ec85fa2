# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.generation.text import Sample as Sample
from jaxmoe.run.reporter import EvaluateResult as EvaluateResult
from jaxmoe.run.reporter import TrainedStep as TrainedStep
from jaxmoe.run.reporter import TrainResult as TrainResult
from jaxmoe.run.reporter import check_packages as check_packages
from jaxmoe.run.run import Run as Run
from jaxmoe.run.supervision import Supervision as Supervision
