# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: one commit of state, config and data position, restored on any mesh.

`from_huggingface` reads the weights of others.
"""

from jaxmoe.checkpoint.huggingface import from_huggingface as from_huggingface
from jaxmoe.checkpoint.manager import CheckpointManager as CheckpointManager
from jaxmoe.checkpoint.manager import load_checkpoint as load_checkpoint
from jaxmoe.checkpoint.manager import save_checkpoint as save_checkpoint
from jaxmoe.checkpoint.manifest import CheckpointError as CheckpointError
