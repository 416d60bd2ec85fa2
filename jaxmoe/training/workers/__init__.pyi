# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.training.workers.between_jobs import BetweenJobs as BetweenJobs
from jaxmoe.training.workers.gradient_state import GradientTraining as GradientTraining
from jaxmoe.training.workers.gradient_step import make_gradient_step as make_gradient_step
from jaxmoe.training.workers.of_run import RunWorkers as RunWorkers
from jaxmoe.training.workers.one import OneWorker as OneWorker
from jaxmoe.training.workers.state import WorkerStates as WorkerStates
from jaxmoe.training.workers.state import WorkerTraining as WorkerTraining
from jaxmoe.training.workers.step import make_worker_step as make_worker_step
