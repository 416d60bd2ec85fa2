# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.checkpoint.commit import LeaseLostError as LeaseLostError
from jaxmoe.checkpoint.commit import SavesFailedError as SavesFailedError
from jaxmoe.checkpoint.huggingface import from_huggingface as from_huggingface
from jaxmoe.checkpoint.huggingface import read_huggingface as read_huggingface
from jaxmoe.checkpoint.huggingface import to_huggingface as to_huggingface
from jaxmoe.checkpoint.manager import CheckpointManager as CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointAbandonedError as CheckpointAbandonedError
from jaxmoe.checkpoint.manifest import CheckpointDamagedError as CheckpointDamagedError
from jaxmoe.checkpoint.manifest import CheckpointError as CheckpointError
from jaxmoe.checkpoint.single import load_checkpoint as load_checkpoint
from jaxmoe.checkpoint.single import save_checkpoint as save_checkpoint
