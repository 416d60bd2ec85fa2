# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names the verticals: capabilities that most users never switch on, and the tests of each.

`make test` runs the tests of the core and one smoke row of each vertical. The other tests of a
vertical run in `make test-all`, and in CI when the vertical changed: its own files, its tests, or
the sockets of the core that it acts through. A single test or row of a file of the core belongs to
a vertical by `pytest.mark.vertical("name")`.

To add a vertical: a row in VERTICALS. Globs are relative to the root; `*` crosses folders.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vertical:
    """A capability and its tests.

    Attributes:
        sources: Globs of its own files.
        tests: Globs of the files of tests that are of it alone.
        smoke: The test that runs with the core's; `file::name`, a parameter in brackets.
        sockets: Globs of files of the core whose changes make its tests due.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    smoke: str
    sockets: tuple[str, ...] = ()


_STEP = ("jaxmoe/training/step.py", "jaxmoe/training/state.py", "jaxmoe/training/gradients.py")
_LAYERS = ("jaxmoe/models/transformer.py", "jaxmoe/layers/block.py", "jaxmoe/layers/records.py")
_RUN = ("jaxmoe/run/run.py", "jaxmoe/run/trainer.py", "jaxmoe/run/config.py")
_ENGINE = ("jaxmoe/serve/engine.py", "jaxmoe/serve/instance.py", "jaxmoe/serve/plan.py")

VERTICALS = {
    "adapters": Vertical(
        sources=("jaxmoe/contrib/adapters/*",),
        tests=(
            "tests/jaxmoe/contrib/adapters/*",
            "tests/experiments/test_finetune_mixtures.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/adapters/test_switch_lora.py"
            "::test_a_swap_leaves_the_effective_weight"
        ),
        sockets=(
            "jaxmoe/adapters/base.py",
            "jaxmoe/adapters/factors.py",
            "jaxmoe/adapters/lora.py",
            "jaxmoe/layers/view.py",
            "sharding/products/low_rank.py",
        )
        + _STEP,
    ),
    "depth": Vertical(
        sources=("jaxmoe/contrib/depth/*",),
        tests=("tests/jaxmoe/contrib/depth/*",),
        smoke=(
            "tests/jaxmoe/contrib/depth/test_loop.py"
            "::test_one_turn_of_all_layers_is_bitwise_the_stack"
        ),
        sockets=_LAYERS,
    ),
    "diffusion": Vertical(
        sources=("jaxmoe/contrib/diffusion/*",),
        tests=("tests/jaxmoe/contrib/diffusion/*",),
        smoke=(
            "tests/jaxmoe/contrib/diffusion/test_masked_diffusion.py"
            "::test_the_bound_of_a_perfect_denoiser_is_the_entropy[counted]"
        ),
        sockets=("jaxmoe/training/loss.py", "jaxmoe/generation/text.py", "jaxmoe/serve/backend.py")
        + _ENGINE,
    ),
    "elastic": Vertical(
        sources=(
            "jaxmoe/contrib/elastic/*",
            "experiments/resize.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/elastic/*",
            "tests/faults/test_elastic.py",
            "tests/faults/test_resize_processes.py",
            "tests/faults/test_shrink.py",
            "tests/experiments/test_resize.py",
        ),
        smoke="tests/jaxmoe/contrib/elastic/test_resize.py::test_every_refusal_says_what_fits",
        sockets=_RUN,
    ),
    "ensembles": Vertical(
        sources=(
            "jaxmoe/contrib/ensembles/*",
            "experiments/ensemble.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/ensembles/*",
            "tests/experiments/test_ensemble.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/ensembles/test_ensemble.py"
            "::test_the_mixture_equals_sums_of_probabilities[1-parts0]"
        ),
        sockets=("jaxmoe/data/loader.py", "jaxmoe/data/subset.py") + _RUN,
    ),
    "estimators": Vertical(
        sources=("jaxmoe/contrib/estimators/*",),
        tests=(
            "tests/jaxmoe/contrib/estimators/*",
            "tests/experiments/test_estimators.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/estimators/test_evolution.py"
            "::test_linear_fitness_recovers_the_gradient"
        ),
        sockets=("jaxmoe/training/estimators/base.py",) + _STEP,
    ),
    "few_bits": Vertical(
        sources=(
            "jaxmoe/contrib/few_bits/*",
            "pallas_kernels/halo/*",
            "experiments/checkpoint/bitstack.py",
            "experiments/checkpoint/block_order.py",
            "experiments/precision.py",
            "experiments/studies/precision.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/few_bits/*",
            "tests/pallas_kernels/halo/*",
            "tests/experiments/test_convert_bitstack.py",
            "tests/experiments/test_precision.py",
        ),
        smoke="tests/jaxmoe/contrib/few_bits/test_bitstack.py::test_prefix_is_the_truncated_sum",
        sockets=(
            "jaxmoe/models/quantize.py",
            "jaxmoe/models/weight_storage.py",
            "jaxmoe/precision.py",
            "sharding/products/*",
        ),
    ),
    "multi_token_prediction": Vertical(
        sources=("jaxmoe/contrib/multi_token_prediction/*",),
        tests=("tests/jaxmoe/contrib/multi_token_prediction/*",),
        smoke=(
            "tests/jaxmoe/contrib/multi_token_prediction/test_objective.py"
            "::test_tokens_of_another_document_are_not_read"
        ),
        sockets=(
            "jaxmoe/models/predictor.py",
            "jaxmoe/models/decode.py",
            "jaxmoe/models/layer_scan.py",
            "jaxmoe/training/objective.py",
            "jaxmoe/training/loss.py",
            "jaxmoe/checkpoint/huggingface/weights.py",
            "jaxmoe/serve/instance.py",
            "jaxmoe/serve/device/drafting.py",
            "jaxmoe/serve/device/executor.py",
        )
        + _LAYERS,
    ),
    "family_layers": Vertical(
        sources=("jaxmoe/contrib/family_layers/*",),
        tests=("tests/jaxmoe/contrib/family_layers/*",),
        smoke=(
            "tests/jaxmoe/contrib/family_layers/test_shortcut.py"
            "::test_scales_of_latents_are_those_of_their_weights"
        ),
        sockets=(
            "jaxmoe/layers/feed_forwards/moe/*",
            "jaxmoe/layers/mixers/*",
        )
        + _LAYERS,
    ),
    "fleet": Vertical(
        sources=("jaxmoe/contrib/fleet/*",),
        tests=("tests/jaxmoe/contrib/fleet/*",),
        smoke=(
            "tests/jaxmoe/contrib/fleet/test_fleet.py"
            "::test_a_fleet_makes_the_placements_moves_and_plans_of_the_simulator[least_loaded]"
        ),
        sockets=("jaxmoe/serve/members.py", "jaxmoe/run/serving.py", "jaxmoe/serve/http/served.py")
        + _ENGINE,
    ),
    "foreign_models": Vertical(
        sources=("jaxmoe/contrib/foreign_models/*",),
        tests=("tests/jaxmoe/contrib/foreign_models/*",),
        smoke="tests/jaxmoe/contrib/foreign_models/test_specs.py::test_one_sum_per_block[2-llama]",
    ),
    "layerwise": Vertical(
        sources=(
            "jaxmoe/contrib/layerwise/*",
            "experiments/depth.py",
            "experiments/layer_paths.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/layerwise/*",
            "tests/experiments/test_depth.py",
            "tests/experiments/test_layer_paths.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/layerwise/test_chain.py"
            "::test_a_chain_is_bitwise_the_whole_model[uniform]"
        ),
        sockets=_LAYERS,
    ),
    "levels": Vertical(
        sources=(
            "jaxmoe/contrib/levels/*",
            "experiments/levels.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/levels/*",
            "tests/experiments/test_levels.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/levels/test_assign.py"
            "::test_every_document_once_within_capacity_and_buffer[buckets]"
        ),
        sockets=(
            "jaxmoe/data/loader.py",
            "jaxmoe/data/packing.py",
            "jaxmoe/data/repacking.py",
        ),
    ),
    "linear_attention": Vertical(
        sources=("jaxmoe/contrib/linear_attention/*",),
        tests=("tests/jaxmoe/contrib/linear_attention/*",),
        smoke=(
            "tests/jaxmoe/contrib/linear_attention/test_mixers.py"
            "::test_documents_in_a_row_equal_each_alone[short_convolution]"
        ),
        sockets=(
            "jaxmoe/layers/convolution.py",
            "jaxmoe/layers/mixers/cut_rows.py",
            "jaxmoe/layers/mixers/recurrent.py",
        )
        + _LAYERS,
    ),
    "mkor": Vertical(
        sources=("jaxmoe/contrib/mkor/*",),
        tests=("tests/jaxmoe/contrib/mkor/*",),
        smoke="tests/jaxmoe/contrib/mkor/test_mkor.py::test_probes_change_no_value_and_measure_sums",
        sockets=_STEP,
    ),
    "offload": Vertical(
        sources=("jaxmoe/contrib/offload/*",),
        tests=(
            "tests/jaxmoe/contrib/offload/*",
            "tests/faults/test_optimizer_files.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/offload/test_optimizer_parts.py"
            "::test_an_update_in_parts_is_that_of_the_whole[adamw]"
        ),
        sockets=("jaxmoe/training/parts/update.py",) + _STEP,
    ),
    "placement": Vertical(
        sources=(
            "jaxmoe/contrib/placement/*",
            "experiments/place.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/placement/*",
            "tests/experiments/test_place.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/placement/test_placement.py"
            "::test_a_planted_structure_is_found_and_holds_for_other_tokens[0]"
        ),
    ),
    "rl": Vertical(
        sources=(
            "jaxmoe/contrib/rl/*",
            "experiments/rl/*",
        ),
        tests=(
            "tests/jaxmoe/contrib/rl/*",
            "tests/experiments/test_rl.py",
            "tests/jaxmoe/training/test_replayed_steps.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/rl/test_policy_gradient.py"
            "::test_loss_and_gradient_equal_grpo_with_loops[grpo-sequence]"
        ),
        sockets=("jaxmoe/training/loss.py",) + _STEP + _RUN,
    ),
    "serving_lab": Vertical(
        sources=(
            "jaxmoe/contrib/serving_lab/*",
            "experiments/serving*",
        ),
        tests=(
            "tests/jaxmoe/contrib/serving_lab/*",
            "tests/experiments/test_serving*.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/serving_lab/simulation/test_simulation.py"
            "::test_a_faster_chip_and_more_instances_never_lower_goodput[split_fuse]"
        ),
        sockets=("jaxmoe/serve/http/*",) + _ENGINE,
    ),
    "slow_links": Vertical(
        sources=(
            "jaxmoe/contrib/slow_links/*",
            "experiments/outer.py",
            "experiments/studies/outer/*",
            "experiments/launch/sites.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/slow_links/*",
            "tests/faults/test_site*.py",
            "tests/faults/test_replicas.py",
            "tests/faults/test_peers.py",
            "tests/experiments/test_outer.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/slow_links/test_methods.py::test_a_saved_state_goes_on_bitwise[diloco]"
        ),
        sockets=_STEP + _RUN,
    ),
    "survival": Vertical(
        sources=(
            "jaxmoe/contrib/survival/*",
            "experiments/replay.py",
            "experiments/doctor/links.py",
        ),
        tests=(
            "tests/jaxmoe/contrib/survival/*",
            "tests/faults/test_snapshots.py",
            "tests/faults/test_recompute.py",
            "tests/faults/test_lost_stage.py",
        ),
        smoke=(
            "tests/jaxmoe/contrib/survival/test_recovery.py"
            "::test_a_lost_stage_is_the_weighted_mean_of_its_neighbours[1-sources0]"
        ),
        sockets=_RUN,
    ),
    "telemetry": Vertical(
        sources=(
            "jaxmoe/contrib/telemetry/*",
            "experiments/gates.py",
            "experiments/studies/gates/*",
        ),
        tests=("tests/jaxmoe/contrib/telemetry/*",),
        smoke=(
            "tests/jaxmoe/contrib/telemetry/test_congestion.py"
            "::test_gamma_eff_of_a_run_is_recorded_with_its_interval"
        ),
        sockets=("jaxmoe/layers/observer.py", "jaxmoe/run/parts.py") + _LAYERS + _STEP,
    ),
    "token_routes": Vertical(
        sources=("jaxmoe/contrib/token_routes/*",),
        tests=("tests/jaxmoe/contrib/token_routes/*",),
        smoke=(
            "tests/jaxmoe/contrib/token_routes/test_token_shuffle.py"
            "::test_the_more_confident_table_decides"
        ),
        sockets=(
            "sharding/expert_parallel/dispatch*.py",
            "sharding/expert_parallel/routes.py",
            "jaxmoe/layers/feed_forwards/moe/*",
        ),
    ),
}


def matches(path: str, globs: tuple[str, ...]) -> bool:
    """Return whether a path matches one of some globs."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


@functools.cache
def vertical_of(path: str) -> str | None:
    """Return the vertical whose file of tests this is, None for one of the core."""
    return next((name for name, row in VERTICALS.items() if matches(path, row.tests)), None)


def vertical_of_source(path: str) -> str | None:
    """Return the vertical that a source file belongs to, None for one of the core."""
    return next((name for name, row in VERTICALS.items() if matches(path, row.sources)), None)
