"""``fdp train``: a private run from names and numbers.

    fdp train --model gpt-nano --data stdlib --epsilon 8 --steps 300 --out runs/first

Checks come first; files are written only once all of them have passed. The defaults are the arguments below.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

from typer import Exit, Option

WHAT, PRIVACY, TRAINING, HOW = "What to train", "Privacy", "Training", "How to run"
KFAC = "K-FAC (--optimizer kfac)"
RANKS = "On several ranks (started with torchrun -m fdp train ...)"


def train_command(
    model: Annotated[
        str,
        Option(
            help="A preset, such as gpt-nano or mlp, or a local folder in the format of transformers.",
            rich_help_panel=WHAT,
        ),
    ] = "gpt-nano",
    lora: Annotated[
        int | None, Option(help="Train adapters of this rank only; the rest is frozen.", rich_help_panel=WHAT)
    ] = None,
    lora_alpha: Annotated[
        float | None, Option(help="Adapters are scaled by alpha / rank; default: twice the rank.", rich_help_panel=WHAT)
    ] = None,
    lora_targets: Annotated[
        str | None,
        Option(
            help="Leaves to adapt, such as '*.attn.*,*.mlp.*'; default: every matrix of the repeated blocks.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    prefix: Annotated[
        int | None,
        Option(
            help="Train keys and values of this many virtual tokens only, in front of every layer's own.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    train_only: Annotated[
        str | None, Option(help="Train only the leaves that match, such as '*bias'.", rich_help_panel=WHAT)
    ] = None,
    data: Annotated[
        str,
        Option(
            help="stdlib, digits, or a path: texts or records (.jsonl, .ndjson, .json), a file or a folder; tokens "
            "(.npy, .bin).",
            rich_help_panel=WHAT,
        ),
    ] = "stdlib",
    form: Annotated[
        str,
        Option(
            help="What a record is read as: text (of --field), completion (after a prompt), messages; auto: by its "
            "fields; file: every file is one text, whatever its name.",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    field: Annotated[str, Option(help="The field of a record that is read as text.", rich_help_panel=WHAT)] = "text",
    tokenizer: Annotated[
        str | None,
        Option(help="A folder with a tokenizer; default: that of --model, else bytes.", rich_help_panel=WHAT),
    ] = None,
    unit: Annotated[
        str,
        Option(
            help="What one sample is, and whom the guarantee is about: window of tokens, record of a file (prompts of "
            "conversations are not in the loss), user (all their records), row (packed records of anyone).",
            rich_help_panel=WHAT,
        ),
    ] = "window",
    user_field: Annotated[
        str | None, Option(help="With --unit user: the field of a record that says whose it is.", rich_help_panel=WHAT)
    ] = None,
    windows_per_user: Annotated[
        int, Option(help="With --unit user: windows of a user that are used at most.", rich_help_panel=WHAT)
    ] = 8,
    pack: Annotated[
        bool, Option("--pack", help="With --unit user: several short records in one window.", rich_help_panel=WHAT)
    ] = False,
    context: Annotated[
        int | None,
        Option(help="Tokens a language model sees; default: the model's own.", rich_help_panel=WHAT),
    ] = None,
    epsilon: Annotated[
        float | None,
        Option(help="Budget; the noise follows. 8 unless --noise-multiplier.", rich_help_panel=PRIVACY),
    ] = None,
    noise_multiplier: Annotated[
        float | None, Option(help="Noise as a multiple of C, instead of --epsilon.", rich_help_panel=PRIVACY)
    ] = None,
    delta: Annotated[
        float | None,
        Option(help="Default: 1e-6, or 0.01 / --population if that is less.", rich_help_panel=PRIVACY),
    ] = None,
    population: Annotated[
        int | None,
        Option(
            help="The public number of samples, from which the sampling rate comes; default: the number of samples, "
            "rounded up to two digits. The exact number is private.",
            rich_help_panel=PRIVACY,
        ),
    ] = None,
    clip: Annotated[str, Option(help="flat, per-layer, automatic or quantile.", rich_help_panel=PRIVACY)] = "flat",
    max_norm: Annotated[
        float, Option(help="C: the most one sample can add to the sum.", rich_help_panel=PRIVACY)
    ] = 1.0,
    method: Annotated[
        str,
        Option(
            help="How clipped sums are made: auto, ghost, ghost_bk, flash, flash_bk, materialize; none: without "
            "privacy.",
            rich_help_panel=PRIVACY,
        ),
    ] = "auto",
    batch_size: Annotated[int, Option(help="Expected samples per step (Poisson).", rich_help_panel=TRAINING)] = 64,
    steps: Annotated[int, Option(help="Steps.", rich_help_panel=TRAINING)] = 40,
    lr: Annotated[
        float | None,
        Option(
            help="Peak learning rate; default: 4e-3; of kfac 0.1, of adagrad 0.01, of adadelta 1.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    optimizer: Annotated[
        str,
        Option(help="adamw, adam, sgd, lamb, adafactor, adagrad, adadelta, adamax or kfac.", rich_help_panel=TRAINING),
    ] = "adamw",
    clip_value: Annotated[
        float | None,
        Option(
            help="Clip each element of the mean gradient, after the noise, to this size; a sample's by --clip.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    weight_decay: Annotated[float, Option(help="Weight decay.", rich_help_panel=TRAINING)] = 0.0,
    schedule: Annotated[str, Option(help="constant or cosine.", rich_help_panel=TRAINING)] = "cosine",
    warmup: Annotated[
        int | None, Option(help="Steps of linear warm-up; default: a tenth of the steps.", rich_help_panel=TRAINING)
    ] = None,
    seed: Annotated[
        int | None,
        Option(
            help="For repeatable experiments; default: entropy of the operating system.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    kfac_damping: Annotated[
        float, Option(help="Added to the curvature; more is closer to plain gradients.", rich_help_panel=KFAC)
    ] = 3e-2,
    kfac_period: Annotated[
        int, Option(help="Steps between measurements of the curvature, one microbatch each.", rich_help_panel=KFAC)
    ] = 10,
    kfac_data: Annotated[
        str | None,
        Option(
            help="What the curvature of a private run is measured on: synthetic (Zipf tokens or pink noise images), a "
            "path to public data like --data, or noised (private data, clipped and noised, out of the same budget). "
            "With --method none: leave out, it is --data itself.",
            rich_help_panel=KFAC,
        ),
    ] = None,
    kfac_max_norm: Annotated[
        float,
        Option(
            help="C of noised statistics: the most one sample can add; 1 is the norm of a synthetic sample's.",
            rich_help_panel=KFAC,
        ),
    ] = 1.0,
    kfac_noise: Annotated[
        float | None,
        Option(
            help="Noise of noised statistics as a multiple of their C; default: what spends a third of --epsilon by "
            "itself, or --noise-multiplier.",
            rich_help_panel=KFAC,
        ),
    ] = None,
    kfac_policy: Annotated[
        str,
        Option(
            help="auto: per layer, by cost; all: dense wherever a layer can be. Private: always dense up to 4096 "
            "features, diagonal beyond.",
            rich_help_panel=KFAC,
        ),
    ] = "auto",
    kfac_fisher: Annotated[
        str,
        Option(
            help="Labels that gradients are taken of: sampled from the model, exact (all of them), empirical (the "
            "data's).",
            rich_help_panel=KFAC,
        ),
    ] = "sampled",
    kfac_distribution: Annotated[
        str,
        Option(
            help="Over ranks: gather (all invert all), owner (one inverts for all), ring (columns stay).",
            rich_help_panel=KFAC,
        ),
    ] = "gather",
    kfac_sharing: Annotated[
        str,
        Option(
            help="How the tokens of a sample count: each by itself (expand), or all as one (reduce).",
            rich_help_panel=KFAC,
        ),
    ] = "expand",
    kfac_momentum: Annotated[float, Option(help="Of preconditioned gradients.", rich_help_panel=KFAC)] = 0.9,
    kfac_kl_clip: Annotated[
        float,
        Option(help="About the most that a step may change the predictions by; 0: no limit.", rich_help_panel=KFAC),
    ] = 1e-2,
    kfac_max_condition: Annotated[
        float | None,
        Option(
            help="Raise small eigenvalues until largest / smallest is at most this; takes eigenvalues, and no ring.",
            rich_help_panel=KFAC,
        ),
    ] = None,
    kfac_rho: Annotated[
        float,
        Option(
            help="With --kfac-policy auto: what K-FAC may cost of a layer's own part of a step; 1 doubles it.",
            rich_help_panel=KFAC,
        ),
    ] = 1.0,
    kfac_cap: Annotated[
        int, Option(help="Columns of a side, over all ranks, that are kept at most.", rich_help_panel=KFAC)
    ] = 8192,
    microbatch: Annotated[
        int,
        Option(
            help="Samples of all ranks computed at once; changes speed and memory only, but with kfac, which measures "
            "as many.",
            rich_help_panel=HOW,
        ),
    ] = 32,
    dtype: Annotated[str, Option(help="float32 or bfloat16.", rich_help_panel=HOW)] = "float32",
    compile: Annotated[
        str,
        Option(
            help="none; block: every kind of block once, the rest by kernels (quick start); step: one graph per "
            "microbatch and one for the update.",
            rich_help_panel=HOW,
        ),
    ] = "none",
    cuda_graph: Annotated[
        bool, Option("--cuda-graph", help="Record the whole step once and replay it (GPU).", rich_help_panel=HOW)
    ] = False,
    device: Annotated[str, Option(help="auto, cpu or cuda.", rich_help_panel=HOW)] = "auto",
    memory_budget: Annotated[
        float | None,
        Option(help="GiB that --method auto or flash may keep between norms and sum.", rich_help_panel=HOW),
    ] = None,
    mesh: Annotated[
        str | None,
        Option(
            help="Axes of the processes that torchrun started: shard=4, or replicate=2,shard=2,tensor=2.",
            rich_help_panel=RANKS,
        ),
    ] = None,
    zero: Annotated[
        int,
        Option(
            help="What is cut along shard: 0 nothing, 2 parameters and state, 3 and gathered block by block.",
            rich_help_panel=RANKS,
        ),
    ] = 3,
    offload: Annotated[
        str,
        Option(help="Kept on the CPU: none, all, or a list of params, grads, optimizer.", rich_help_panel=RANKS),
    ] = "none",
    checkpoint_activations: Annotated[
        bool,
        Option(
            "--checkpoint-activations",
            help="Keep only every block's input and run its forward again; --zero 3 always does.",
            rich_help_panel=RANKS,
        ),
    ] = False,
    reduce: Annotated[
        str,
        Option(
            help="Sums travel once per step (step) or block by block (microbatch); auto: the latter for --zero 3.",
            rich_help_panel=RANKS,
        ),
    ] = "auto",
    reduce_dtype: Annotated[
        str,
        Option(
            help="In what they travel; auto: float64 if private, else float32. Private float32 rounds, see README.",
            rich_help_panel=RANKS,
        ),
    ] = "auto",
    replicate_data: Annotated[
        bool,
        Option("--replicate-data", help="Every rank computes the whole batch; the same result.", rich_help_panel=RANKS),
    ] = False,
    timeout: Annotated[
        float, Option(help="Seconds to wait for a rank that does not answer.", rich_help_panel=RANKS)
    ] = 600.0,
    save_every: Annotated[
        int | None,
        Option(help="Steps between checkpoints in --out; the same command then resumes.", rich_help_panel=HOW),
    ] = None,
    keep: Annotated[int, Option(help="Checkpoints kept, the newest.", rich_help_panel=HOW)] = 2,
    out: Annotated[
        Path | None,
        Option(help="Where the run's files go; default: runs/<model>-<data>-<n>.", rich_help_panel=HOW),
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.", rich_help_panel=HOW)] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print the summary as one JSON object, last.", rich_help_panel=HOW)
    ] = False,
) -> None:
    """Train a model privately. The budget covers the parameters, not the metrics shown on the way."""
    settings = dict(locals())
    # On a CPU without bfloat16 torch says so with a stack trace of its own for a warning, and goes on.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    # torch takes seconds to import, and --help and mistakes on the command line should not.
    from fdp.cli.configure import learning_rate
    from fdp.cli.session import train
    from fdp.parallel import launch
    from fdp.parallel.agree import check_agreement

    settings["lr"] = learning_rate(settings)  # as a number, so that a run taken up again is compared by it
    if launch.started_by_torchrun():
        device_type = launch.device_type(device)
        with launch.join_ranks(device_type, timeout=timeout) as ranks:
            check_agreement(settings)
            code = train(settings, ranks)
    else:
        code = train(settings)
    if code:
        raise Exit(code)
