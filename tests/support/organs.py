# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Why a default of a base class that one subclass alone replaces is at its place.

Such a default is named by class and member. A new one is refused by `tests/test_shape.py` until it
has a reason here; most are better placed in a table of combinations, in a record of traits, or in
the one file that needs them.
"""

from typing import Final

REASONS: Final[dict[str, str]] = {
    # Layers.
    "AttentionConfig.initial_cache": "every mixer has one; shared keys keep attention's, of fewer"
    " layers",
    "AttentionConfig.num_heads": "a default of heads that suits the experts of a token of JetMoE",
    "ExecutionConfig.cache_reading": "attention asks any execution; decoding alone reads part of a"
    " cache, which may change the loss and is therefore no field",
    "GateBase.scales_input": "the layer asks any gate what it multiplies; a gate that is the score"
    " itself is that of the one family with scaled inputs",
    "GateBase.mix_shared": "a sum is what every other gate wants, one of another package included;"
    " SqrtGate is defined by keeping the RMS of both branches",
    "LatentAttention._into_latents": "each latent attention makes latents of the stream; one family"
    " multiplies them by factors of their widths, before positions and caches",
    "RowTransform.rows_per_sequence": "caches and FLOPs count the rows of any mixer; streams are"
    " rows, and nothing else tells their number",
    "Block.setup": "a module of multi-token prediction is a layer with a projection before it and a"
    " norm behind, built where a layer builds its own",
    "NormBase.build": "any norm builds its module; the norm of JetMoE's layers has an epsilon of"
    " its own",
    # Routing.
    "SelectionBias.init": "every bias has a state, zeros by expert; the one with a histogram keeps"
    " it there, too",
    "TopKConfig.is_over_chosen": "an option of softmax scores, which the one `score` of the family"
    " passes on",
    # Devices.
    "SequenceForm.reads": "a layer hands a form the scalars of a micro-batch that it names; packing"
    " by level is laid out by one",
    "SequenceParallelism.mesh_fold": "the execution asks any choice for its mesh; rings of each"
    " level need mesh.seq cut in two, again and again",
    # Training.
    "Feed.check": "a feed may need an engine, and refuses before the run directory is taken",
    "Feed.session": "rollouts keep an engine open between the steps of a loop, and draw, score and"
    " take several updates where data take one",
    "Gradients.paths": "plans, headers and pipelines ask which layers a micro-batch passes through;"
    " leaving some out is one choice",
    "Objective.has_signal": "the update asks it; advantages that are all zero must change nothing",
    "Objective.token_loss": "the likelihood, weighed, for all but policy gradients, which bend it;"
    " chunks and pipelines call it for some positions",
    "Optimizer.rate_ratio": "the rate of a group is in the formula of every optimiser; those with"
    " matrices have AdamW beside them at a rate of its own",
    "Optimizer.resolve_dtype": "a plan asks any optimiser; of those here only Newton-Schulz has"
    " products of a dtype of its own, as one of another package may",
    "ReplicasKind.adapt": "only the plan makes optimisers, before workers; 1-bit Adam receives its"
    " momentum from them",
    "StepPart.check": "a step made without the config of a run, whose rows are not read then,"
    " refuses a part with which it cannot be",
    "StepPart.reads_row_losses": "backpropagation keeps the losses of rows only where a part reads"
    " them",
    # Runs.
    "RunPart.join": "a site compiles first and joins the others last, when nothing can fail any"
    " more",
    "RunPart.move": "the trainer hands over the arrays of a state one by one, so that no device"
    " holds two; resizing takes them",
    # Capabilities.
    "Adapter.backward": "ReMix's router learns from several passes over each row, which only what"
    " differentiates a step can make; it asks any adapter",
    "DispatchConfig.after_pilot": "only P/D-Serve sets its numbers of instances by measured times;"
    " the command that runs the pilot knows no member",
    "Instance._work": "a step reads the tokens and the table of pages of its sequence; one that is"
    " simulated computes nothing, and needs neither",
    "Instance.view": "a plan that stops between layers sees how far each piece has come; rules and"
    " policies ask any instance",
    "Family.of_files": "the type of a model in config.json names its family; two families of Ling"
    " share one, and differ by their architecture",
    "ItemCache.is_valid": "answers of a semantic cache age; a replay asks before it counts a hit",
    "RequestDispatcher.keeps": "SAGA alone weighs the pages of a call that has ended; the fleet,"
    " which takes them back, asks any dispatcher",
    "RunPartConfig.step_parts": "a run part may bring step parts; CheckFree does here, and the"
    " page of extending shows another in a package of its own",
    "SourceKind.is_implied": "conversations have the flags of files, and text of files is not to"
    " become conversations; the parser of flags asks the members of any choice",
}
"""{"Class.member": why one subclass needs it, and why the base class is its place}."""
