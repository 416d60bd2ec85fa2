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
        "jaxmoe.contrib.levels.buckets:BucketsConfig",
        "The lowest level that holds a document (ByteScale).",
    ),
    "milp": (
        "jaxmoe.contrib.levels.milp:MilpConfig",
        "Levels by an integer linear program (FlexSP).",
    ),
    "zones": (
        "jaxmoe.contrib.levels.zones:ZonesConfig",
        "One device, one host or all hosts, by the length of a document (Zeppelin).",
    ),
}
_SKIPPING: Final = {
    "skipping": (
        "jaxmoe.contrib.depth.skipping:SkippingConfig",
        "Layers that a micro-batch leaves out (SkipPipe), and their order (CheckFree+).",
    ),
}
_DETAILS: Final = {
    "routers": (
        "jaxmoe.contrib.telemetry.details:RouterDetails",
        "One row of statistics per MoE layer on the held-out batches; none for a dense model.",
    ),
    "two_sizes": (
        "jaxmoe.contrib.depth.size_oracle:SizeDetails",
        "The losses of all choices of sizes on the first held-out batch, a row for each budget.",
    ),
}
_SUBSET: Final = {
    "clusters": (
        "jaxmoe.contrib.ensembles.partition:ClusterPartConfig",
        "One of several clusters of similar documents (c-BTM).",
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
        "jaxmoe.contrib.mkor.optimizer:MKORConfig",
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
        "Warm-up, then a straight line to the floor after the last update.",
    ),
    "cosine": (
        "jaxmoe.optim.schedules:CosineConfig",
        "Warm-up, then half a cosine to the floor after the last update.",
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
        "jaxmoe.contrib.diffusion.masked_diffusion:MaskedDiffusionConfig",
        "Predict masked tokens from the rest of the row; needs attention.is_causal False.",
    ),
    "swept_layers": (
        "jaxmoe.contrib.layerwise.swept_layers:SweptLayersConfig",
        "Predict each token, also from layers that are evaluated in parallel sweeps (SNLP).",
    ),
    "multi_token_prediction": (
        "jaxmoe.contrib.multi_token_prediction.objective:MultiTokenPredictionConfig",
        "Predict each token, and those further ahead by the modules of the model (DeepSeek-V3).",
    ),
    "policy_gradient": (
        "jaxmoe.contrib.rl.objective:PolicyGradientConfig",
        "Make answers with a high reward likelier (GRPO); needs rollouts, see experiments.rl.",
    ),
}
_GRADIENTS: Final = {
    "backprop": ("jaxmoe.training.estimators.backprop:BackpropConfig", "Backpropagation."),
    "spsa": (
        "jaxmoe.contrib.estimators.spsa:SPSAConfig",
        "Derivatives along random directions, from forward passes only (MeZO).",
    ),
    "seed_pool": (
        "jaxmoe.contrib.estimators.seed_pool:SeedPoolConfig",
        "Derivatives along directions from a fixed pool of seeds (FedKSeed).",
    ),
    "evolution": (
        "jaxmoe.contrib.estimators.evolution:EvolutionConfig",
        "Evolution strategies with perturbations of low rank (EGGROLL).",
    ),
    "surrogate": (
        "jaxmoe.contrib.estimators.surrogate:SurrogateConfig",
        "Gradient of a surrogate of the loss, for at most 100,000 trained values (FZooS).",
    ),
}
_AVERAGE: Final = {
    "fixed": (
        "jaxmoe.contrib.adapters.average:FixedAverageConfig",
        "An average with a fixed weight of new parameters.",
    ),
    "balanced": (
        "jaxmoe.contrib.adapters.average:BalancedAverageConfig",
        "An average with a weight that balances stability and plasticity.",
    ),
}
_FEED: Final = {
    "rollouts": (
        "jaxmoe.contrib.rl.config:RolloutsConfig",
        "Answers that the model in training writes, and their rewards.",
    ),
}
_REWARD: Final = {
    "arithmetic": (
        "jaxmoe.contrib.rl.rewards.arithmetic:ArithmeticConfig",
        "Calculate with two numbers; 1 for the right number, 0 for anything else.",
    ),
    "countdown": (
        "jaxmoe.contrib.rl.rewards.countdown:CountdownConfig",
        "Reach a target with given numbers, each used once; 1 for an expression that does.",
    ),
    "match": (
        "jaxmoe.contrib.rl.rewards.match:MatchConfig",
        "Questions from a file; 1 for an answer that matches that of the file, 0 for others.",
    ),
    "python": (
        "jaxmoe.contrib.rl.rewards.function:PythonConfig",
        "Questions from a file; the reward of a function of your own.",
    ),
}

_REPLICAS: Final = {
    "none": (
        "jaxmoe.training.replicas:SynchronousConfig",
        "Sums gradients over all devices in every step.",
    ),
    "diloco": (
        "jaxmoe.contrib.slow_links.methods.diloco:DiLoCoConfig",
        "Averages all parameters every few hundred steps, with Nesterov momentum.",
    ),
    "streaming": (
        "jaxmoe.contrib.slow_links.methods.streaming:StreamingConfig",
        "Averages one fragment of the parameters at a time, in four bits, merged a step later.",
    ),
    "sparse": (
        "jaxmoe.contrib.slow_links.methods.sparse:SparseConfig",
        "Averages the largest changes of each 64 x 64 tile, in two bits, with error feedback.",
    ),
    "heterogeneous": (
        "jaxmoe.contrib.slow_links.methods.heterogeneous:HeterogeneousConfig",
        "Averages the largest changes, of which workers with slow links send fewer.",
    ),
    "noloco": (
        "jaxmoe.contrib.slow_links.methods.noloco:NoLoCoConfig",
        "Averages random pairs of workers, each with its own slow parameters, without all-reduce.",
    ),
    "co2": (
        "jaxmoe.contrib.slow_links.methods.co2:CO2Config",
        "Averages all parameters a whole round late, beside the step that sends them.",
    ),
    "single_merge": (
        "jaxmoe.contrib.slow_links.methods.single_merge:SingleMergeConfig",
        "Averages with a few random peers, and with all workers at the end.",
    ),
    "spes": (
        "jaxmoe.contrib.slow_links.methods.spes:SpesConfig",
        "Trains each expert on one worker, and averages everything else.",
    ),
    "a2cid2": (
        "jaxmoe.contrib.slow_links.methods.a2cid2:A2cid2Config",
        "Averages neighbours of a graph, helped by a second copy of the parameters.",
    ),
    "coded": (
        "jaxmoe.contrib.slow_links.methods.coded:CodedConfig",
        "Computes parts of the batch several times, so that gradients of some workers may be bad.",
    ),
    "econtrol": (
        "jaxmoe.contrib.slow_links.methods.econtrol:EControlConfig",
        "Sends the largest changes of the gradient, with a controlled error.",
    ),
    "one_bit_adam": (
        "jaxmoe.contrib.slow_links.methods.one_bit_adam:OneBitAdamConfig",
        "Sends one bit a number of Adam's momentum, after steps with whole gradients.",
    ),
    "robust": (
        "jaxmoe.contrib.slow_links.methods.robust:RobustConfig",
        "Replaces the mean of gradients by one that few hostile workers cannot turn.",
    ),
}

_PARAMETERIZATION: Final = {
    "standard": (
        "jaxmoe.scaling.standard:StandardConfig",
        "Variance 1/fan_in, one learning rate for every role.",
    ),
    "mup": ("jaxmoe.scaling.mup:MuPConfig", "muP with AdamW: hidden rates fall as 1/width."),
    "mup_plus_plus": (
        "jaxmoe.scaling.mup:MuPPlusPlusConfig",
        "muP++ with AdamW: muP with 1/sqrt(depth) in the rates and in the residual branches.",
    ),
    "completep": (
        "jaxmoe.scaling.completep:CompletePConfig",
        "CompleteP with AdamW: width and depth, with Adam's epsilon and the decay scaled too.",
    ),
    "mup_muon": ("jaxmoe.scaling.mup:MuPMuonConfig", "muP for Muon, without a law of depth."),
    "mup_plus_plus_muon": (
        "jaxmoe.scaling.mup:MuPPlusPlusMuonConfig",
        "muP++ for Muon, the baseline of the HyperP paper.",
    ),
    "muonh_vanilla": (
        "jaxmoe.scaling.muonh_vanilla:VanillaMuonHConfig",
        "MuonH alone, without laws of depth and tokens: HyperP's control.",
    ),
    "hyperp": (
        "jaxmoe.scaling.hyperp:HyperPConfig",
        "HyperP (for MuonH): one learning rate for every width, depth, length of run and expert.",
    ),
}

_TRACKER: Final = {
    "tensorboard": (
        "jaxmoe.tracking.tensorboard:TensorBoardConfig",
        "Event files for `tensorboard --logdir runs`.",
    ),
    "wandb": (
        "jaxmoe.tracking.wandb:WandbConfig",
        "Weights & Biases; the key comes from `wandb login` or WANDB_API_KEY.",
    ),
    "trackio": (
        "jaxmoe.tracking.trackio:TrackioConfig",
        "Trackio, on this machine or in a Hugging Face space.",
    ),
}

_RUN_PART: Final = {
    "snapshots": (
        "jaxmoe.contrib.survival.snapshots:SnapshotsConfig",
        "Keeps the state in host memory, with parity: restarted processes continue from there.",
    ),
    "check_free": (
        "jaxmoe.contrib.survival.recovery:CheckFreeConfig",
        "Replaces the layers of a lost pipeline stage by the mean of their neighbours.",
    ),
    "recomputation": (
        "jaxmoe.contrib.survival.devices:RecomputationConfig",
        "Computes steps twice, which finds a device that computes wrong numbers.",
    ),
    "link_measurements": (
        "jaxmoe.contrib.survival.devices:LinkMeasurementsConfig",
        "Measures the links between devices with messages of 1 MiB, and names slow ones.",
    ),
    "gradient_comparison": (
        "jaxmoe.contrib.telemetry.gradients:GradientComparisonConfig",
        "Compares the gradients of workers, the parts of the batch, and names those that differ.",
    ),
    "time_limit": (
        "jaxmoe.run.parts:TimeLimitConfig",
        "Ends the run in order after a time, as SIGTERM does: the state is saved.",
    ),
}

_TOKENIZER: Final = {
    "bytes": (
        "jaxmoe.data.tokenizer.base:BytesConfig",
        "Every byte is a token; vocabulary 256.",
    ),
    "file": (
        "jaxmoe.data.tokenizer.subword:FileConfig",
        "A tokenizer.json, as Hugging Face's `tokenizers` writes it.",
    ),
    "trained": (
        "jaxmoe.data.tokenizer.subword:TrainedConfig",
        "A byte-level BPE vocabulary, trained here on the train split and kept in the cache.",
    ),
    "ids": (
        "jaxmoe.data.tokenizer.base:IdsConfig",
        "No text: pre-tokenised files of token ids.",
    ),
}

BASES: Final = {
    "data": "jaxmoe.data.source:SourceKind",
    "tokenizer": "jaxmoe.data.tokenizer.base:TokenizerConfig",
    "assign": "jaxmoe.data.repacking:Assigner",
    "skipping": "jaxmoe.training.estimators.skipping:Skipping",
    "details": "jaxmoe.run.measures:Details",
    "subset": "jaxmoe.data.subset:SubsetConfig",
    "optimizer": "jaxmoe.optim.groups:Optimizer",
    "schedule": "jaxmoe.optim.schedules:ScheduleBase",
    "objective": "jaxmoe.training.objective:Objective",
    "gradients": "jaxmoe.training.estimators.base:Gradients",
    "average": "jaxmoe.training.parts.average:Average",
    "feed": "jaxmoe.training.feed:FeedConfig",
    "reward": "jaxmoe.contrib.rl.rewards.base:RewardBase",
    "replicas": "jaxmoe.training.replicas:ReplicasKind",
    "parameterization": "jaxmoe.scaling.parameterization:ParameterizationBase",
    "tracker": "jaxmoe.tracking.tracker:TrackerBase",
    "run_part": "jaxmoe.run.config:RunPartConfig",
}

MEMBERS: Final = {
    "data": _DATA,
    "tokenizer": _TOKENIZER,
    "assign": _ASSIGN,
    "skipping": _SKIPPING,
    "details": _DETAILS,
    "subset": _SUBSET,
    "optimizer": _OPTIMIZER,
    "schedule": _SCHEDULE,
    "objective": _OBJECTIVE,
    "gradients": _GRADIENTS,
    "average": _AVERAGE,
    "feed": _FEED,
    "reward": _REWARD,
    "replicas": _REPLICAS,
    "parameterization": _PARAMETERIZATION,
    "tracker": _TRACKER,
    "run_part": _RUN_PART,
}
