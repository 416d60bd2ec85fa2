# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.checkpoint import load_checkpoint as load_checkpoint
from jaxmoe.checkpoint import save_checkpoint as save_checkpoint
from jaxmoe.execution import ExecutionConfig as ExecutionConfig
from jaxmoe.generation.pretrained import Pretrained as Pretrained
from jaxmoe.generation.pretrained import from_huggingface as from_huggingface
from jaxmoe.models.config import AttentionConfig as AttentionConfig
from jaxmoe.models.config import LatentAttentionConfig as LatentAttentionConfig
from jaxmoe.models.config import ModelConfig as ModelConfig
from jaxmoe.models.config import MoEConfig as MoEConfig
from jaxmoe.models.decode import generate as generate
from jaxmoe.models.transformer import Output as Output
from jaxmoe.models.transformer import Transformer as Transformer
from jaxmoe.parts import MoE as MoE
from jaxmoe.scaling.initialize import init_params as init_params
from jaxmoe.scaling.initialize import parameter_table as parameter_table
from jaxmoe.training.state import TrainState as TrainState
from jaxmoe.training.state import init_state as init_state
from jaxmoe.training.step import StepMetrics as StepMetrics
from jaxmoe.training.step import make_train_step as make_train_step

__version__: str
