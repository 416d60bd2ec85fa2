# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.training.pipeline.gradients import held_out_parts as held_out_parts
from jaxmoe.training.pipeline.gradients import pipeline_forward as pipeline_forward
from jaxmoe.training.pipeline.stages import check_pipeline as check_pipeline
