# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Members of the choices of a run: data, optimisers, objectives, how gradients come about."""

from typing import Final

_DATA: Final = {
    "corpus": (
        "jaxmoe.data.corpus:CorpusConfig",
        "The source code of the running Python's standard library, byte level, no download.",
    ),
    "files": (
        "jaxmoe.data.files:FilesConfig",
        "Text, JSON lines, Parquet or token ids from files of your own.",
    ),
    "mixture": (
        "jaxmoe.data.mixture:MixtureConfig",
        "Several collections of files, each with a weight.",
    ),
    "huggingface": (
        "jaxmoe.data.huggingface:HuggingFaceConfig",
        "A data set of the Hugging Face hub, or one saved to a directory.",
    ),
    "chat": (
        "jaxmoe.data.chat:ChatConfig",
        "Conversations from files of your own; trains on the answers.",
    ),
    "markov": (
        "jaxmoe.data.synthetic:MarkovConfig",
        "Markov chain of order k, a language with exactly known entropy.",
    ),
    "language_mixture": (
        "jaxmoe.data.synthetic:LanguageMixtureConfig",
        "Disjoint languages, one per row: the ideal expert of every token is known.",
    ),
    "tokenizer_only": (
        "jaxmoe.data.text_only:TextOnlyConfig",
        "No rows, only a tokenizer: for models that generate and are not trained.",
    ),
}
_ASSIGN: Final = {
    "buckets": (
        "jaxmoe.data.levels.buckets:BucketsConfig",
        "The lowest level that holds a document (ByteScale).",
    ),
    "milp": ("jaxmoe.data.levels.milp:MilpConfig", "Levels by an integer linear program (FlexSP)."),
    "zones": (
        "jaxmoe.data.levels.zones:ZonesConfig",
        "One device, one host or all hosts, by the length of a document (Zeppelin).",
    ),
}
_OPTIMIZER: Final = {
    "adamw": ("jaxmoe.optim.adamw:AdamWConfig", "AdamW for every role."),
    "muon": ("jaxmoe.optim.muon:MuonConfig", "Muon for matrices, AdamW for all else."),
    "muonh": (
        "jaxmoe.optim.muonh:MuonHConfig",
        "Muon on spheres for matrices, Adam on a sphere for the head, AdamW for all else: HyperP.",
    ),
    "mkor": (
        "jaxmoe.optim.mkor:MKORConfig",
        "AdamW, with the gradients of dense matrices between inverse factors (MKOR).",
    ),
    "sgd": (
        "jaxmoe.optim.sgd:SGDConfig",
        "Gradient descent for every role, in whichever group the parameterisation puts it.",
    ),
}
_SCHEDULE: Final = {
    "linear": (
        "jaxmoe.optim.schedules:LinearConfig",
        "Warm-up, then a straight line to the floor at the last step.",
    ),
    "cosine": (
        "jaxmoe.optim.schedules:CosineConfig",
        "Warm-up, then half a cosine to the floor at the last step.",
    ),
    "wsd": (
        "jaxmoe.optim.schedules:WarmupStableDecayConfig",
        "Warm-up, constant, then a straight line to the floor (WSD, arXiv 2404.06395).",
    ),
}
_OBJECTIVE: Final = {
    "next_token": (
        "jaxmoe.training.next_token:NextTokenConfig",
        "Predict each token from those before it.",
    ),
    "masked_diffusion": (
        "jaxmoe.training.masked_diffusion:MaskedDiffusionConfig",
        "Predict masked tokens from the rest of the row; needs attention.is_causal False.",
    ),
    "swept_layers": (
        "jaxmoe.contrib.training.swept_layers:SweptLayersConfig",
        "Predict each token, also from layers that are evaluated in parallel sweeps (SNLP).",
    ),
    "policy_gradient": (
        "jaxmoe.training.policy_gradient.objective:PolicyGradientConfig",
        "Make answers with a high reward likelier (GRPO); needs rollouts, see experiments.rl.",
    ),
}
_GRADIENTS: Final = {
    "backprop": ("jaxmoe.training.estimators.backprop:BackpropConfig", "Backpropagation."),
    "spsa": (
        "jaxmoe.training.estimators.spsa:SPSAConfig",
        "Derivatives along random directions, from forward passes only (MeZO).",
    ),
    "seed_pool": (
        "jaxmoe.training.estimators.seed_pool:SeedPoolConfig",
        "Derivatives along directions from a fixed pool of seeds (FedKSeed).",
    ),
    "evolution": (
        "jaxmoe.training.estimators.evolution:EvolutionConfig",
        "Evolution strategies with perturbations of low rank (EGGROLL).",
    ),
    "surrogate": (
        "jaxmoe.contrib.training.surrogate:SurrogateConfig",
        "Gradient of a surrogate of the loss, for at most 100,000 trained values (FZooS).",
    ),
}
_AVERAGE: Final = {
    "fixed": (
        "jaxmoe.adapters.average:FixedAverageConfig",
        "An average with a fixed weight of new parameters.",
    ),
    "balanced": (
        "jaxmoe.adapters.average:BalancedAverageConfig",
        "An average with a weight that balances stability and plasticity.",
    ),
}
_REWARD: Final = {
    "arithmetic": (
        "jaxmoe.rl.rewards.arithmetic:ArithmeticConfig",
        "Calculate with two numbers; 1 for the right number, 0 for anything else.",
    ),
    "countdown": (
        "jaxmoe.rl.rewards.countdown:CountdownConfig",
        "Reach a target with given numbers, each used once; 1 for an expression that does.",
    ),
    "match": (
        "jaxmoe.rl.rewards.match:MatchConfig",
        "Questions from a file; 1 for an answer that matches that of the file, 0 for others.",
    ),
    "python": (
        "jaxmoe.rl.rewards.function:PythonConfig",
        "Questions from a file; the reward of a function of your own.",
    ),
}

BASES: Final = {
    "data": "jaxmoe.data.source:SourceKind",
    "assign": "jaxmoe.data.levels.plan:Assigner",
    "optimizer": "jaxmoe.optim.groups:Optimizer",
    "schedule": "jaxmoe.optim.schedules:ScheduleBase",
    "objective": "jaxmoe.training.objective:Objective",
    "gradients": "jaxmoe.training.estimators.base:Estimator",
    "average": "jaxmoe.adapters.average:Average",
    "reward": "jaxmoe.rl.rewards.base:RewardBase",
}

MEMBERS: Final = {
    "data": _DATA,
    "assign": _ASSIGN,
    "optimizer": _OPTIMIZER,
    "schedule": _SCHEDULE,
    "objective": _OBJECTIVE,
    "gradients": _GRADIENTS,
    "average": _AVERAGE,
    "reward": _REWARD,
}
