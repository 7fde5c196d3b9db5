"""The options of ``fdp train``: names, types, defaults and help, in groups.

>>> options = build(TrainOptions, {"model": "mlp", "epsilon": 3.0})
>>> options.privacy.epsilon, options.kfac.damping
>>> to_dict(options)                                # the settings in config.json, in this order
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from fdp.cli import choices
from fdp.cli.advice_options import AdviceOptions
from fdp.cli.evaluation_options import EvaluationOptions
from fdp.cli.kfac_options import KfacOptions
from fdp.cli.ledger_options import LedgerOptions
from fdp.cli.needs import Needs
from fdp.cli.options import Effect, Flag, Range, options_of
from fdp.cli.rank_options import RankOptions
from fdp.cli.reading_options import ReadingOptions
from fdp.cli.tracking_options import TrackingOptions

HOW, KFAC_RESULT = Effect.EXECUTION, Effect.KFAC_RESULT
COUNT, POSITIVE, NOT_NEGATIVE = Range.COUNT, Range.POSITIVE, Range.NOT_NEGATIVE


@dataclass(frozen=True)
class ModelOptions:
    """The model, and which of its leaves are trained."""

    panel: ClassVar[str] = "What to train"

    model: Annotated[
        str,
        Flag(
            "A preset, such as gpt-nano or mlp, which starts from random parameters, or a local folder in transformers "
            "format, such as a pretrained model.",
            complete=choices.MODELS,
            paths=True,
        ),
    ] = "gpt-nano"
    lora: Annotated[
        int | None, Flag("Train only LoRA adapters of this rank; everything else is frozen.", range=COUNT)
    ] = None
    lora_alpha: Annotated[
        float | None,
        Flag("Scale the adapters by alpha / rank.", default_text="twice the rank", needs=Needs.LORA, range=POSITIVE),
    ] = None
    lora_targets: Annotated[
        str | None,
        Flag(
            "Matrices to adapt: names such as 'q_proj,v_proj', or patterns of paths such as '*.attn.*,*.mlp.*'.",
            default_text="every matrix of the repeated blocks",
            needs=Needs.LORA,
        ),
    ] = None
    prefix: Annotated[
        int | None,
        Flag("Train only the keys and values of this many virtual tokens, put before every layer's own.", range=COUNT),
    ] = None
    train_only: Annotated[str | None, Flag("Train only the leaves that match, such as '*bias'.")] = None


@dataclass(frozen=True)
class DataOptions:
    """The data, and what one sample is."""

    panel: ClassVar[str] = "What to train"

    data: Annotated[
        str,
        Flag(
            "stdlib, digits, or a path: texts or records in a file or folder (.jsonl, .json, .csv, .tsv, also .gz; "
            ".parquet, .arrow, a folder saved by datasets), or a file of tokens (.npy, .bin).",
            complete=choices.DATA,
            paths=True,
        ),
    ] = "stdlib"
    form: Annotated[
        str,
        Flag(
            "How to read a record: text (its --field), completion (after a prompt) or messages; auto decides by its "
            "fields; file reads every file as one text, whatever its name.",
            needs=Needs.TEXTS,
            complete=choices.FORMS,
        ),
    ] = "auto"
    field: Annotated[str, Flag("The field of a record that is read as text.", needs=Needs.RECORDS)] = "text"
    tokenizer: Annotated[
        str | None,
        Flag(
            "A folder with a tokenizer, or bytes: UTF-8 bytes as tokens.",
            default_text="the tokenizer of --model; for presets bytes",
            complete=("bytes",),
            paths=True,
        ),
    ] = None
    unit: Annotated[
        str,
        Flag(
            "What one sample is, which is what the guarantee protects: a window of tokens, a record (prompts of "
            "conversations are not in the loss), a user (all their records), or a row (packed records of anyone).",
            complete=choices.UNITS,
        ),
    ] = "window"
    user_field: Annotated[
        str | None,
        Flag(
            "With --unit user: the field of a record that names the user it belongs to. For a folder of texts: folder, "
            "which makes each folder inside it a user."
        ),
    ] = None
    windows_per_user: Annotated[
        int,
        Flag(
            "With --unit user, or --unit record with --long split: use at most this many windows of a user or record.",
            needs=Needs.SEVERAL_WINDOWS,
            range=COUNT,
        ),
    ] = 8
    pack: Annotated[
        bool, Flag("With --unit user: pack several short records into one window.", needs=Needs.UNIT_USER)
    ] = False
    context: Annotated[
        int | None, Flag("Tokens a language model sees.", default_text="the model's own", range=COUNT)
    ] = None


@dataclass(frozen=True)
class PrivacyOptions:
    """The privacy budget, or the noise, and how gradients are clipped."""

    panel: ClassVar[str] = "Privacy"

    epsilon: Annotated[
        float | None,
        Flag(
            "Privacy budget; the noise is computed from it.",
            default_text="8, unless --noise-multiplier is given",
            range=POSITIVE,
        ),
    ] = None
    noise_multiplier: Annotated[
        float | None, Flag("Noise as a multiple of C, instead of --epsilon.", range=NOT_NEGATIVE)
    ] = None
    delta: Annotated[
        float | None,
        Flag(
            "The delta of (epsilon, delta).",
            default_text="1e-6, or 0.01 / --population if that is less",
            needs=Needs.PRIVACY,
            range=Range.PROBABILITY,
        ),
    ] = None
    population: Annotated[
        int | None,
        Flag(
            "The public number of samples, which sets the sampling rate. The exact number is private.",
            default_text="the number of samples, rounded up to two digits and a multiple of 10",
            range=COUNT,
        ),
    ] = None
    clip: Annotated[
        str,
        Flag("Clipping: flat, per-layer, automatic or quantile.", needs=Needs.PRIVACY, complete=choices.CLIPS),
    ] = "automatic"
    max_norm: Annotated[
        float, Flag("C: the most one sample can add to the sum.", needs=Needs.PRIVACY, range=POSITIVE)
    ] = 1.0
    method: Annotated[
        str,
        Flag(
            "How clipped sums are computed: auto, ghost, ghost_bk, flash, flash_bk or materialize; none trains without "
            "privacy.",
            complete=choices.METHODS,
        ),
    ] = "auto"


@dataclass(frozen=True)
class TrainingOptions:
    """The steps and the optimizer."""

    panel: ClassVar[str] = "Training"

    batch_size: Annotated[int, Flag("Expected samples per step (Poisson sampling).", range=COUNT)] = 32
    steps: Annotated[int, Flag("Number of steps.", range=COUNT)] = 110
    epochs: Annotated[
        float | None,
        Flag(
            "Passes over the public population, instead of --steps: epochs x population / batch size.", range=POSITIVE
        ),
    ] = None
    lr: Annotated[
        float | None,
        Flag("Peak learning rate.", default_text="8e-3; kfac: 0.1, adagrad: 0.01, adadelta: 1", range=NOT_NEGATIVE),
    ] = None
    optimizer: Annotated[
        str,
        Flag("adamw, adam, sgd, lamb, adafactor, adagrad, adadelta, adamax or kfac.", complete=choices.OPTIMIZERS),
    ] = "adamw"
    moments: Annotated[
        str,
        Flag(
            "Dtype in which AdamW stores its two moments: float32, or bfloat16, rounded up or down at random, which "
            "takes half the memory.",
            needs=Needs.ADAMW,
            complete=choices.MOMENTS,
        ),
    ] = "float32"
    clip_value: Annotated[
        float | None,
        Flag(
            "Clip each element of the noisy mean gradient to this size (--clip clips the samples' gradients).",
            range=POSITIVE,
        ),
    ] = None
    weight_decay: Annotated[float, Flag("Weight decay.", range=NOT_NEGATIVE)] = 0.0
    schedule: Annotated[
        str,
        Flag("Learning rate after the warm-up: constant, cosine or linear (to 0).", complete=choices.SCHEDULES),
    ] = "cosine"
    warmup: Annotated[
        int | None, Flag("Steps of linear warm-up.", default_text="a tenth of the steps", range=NOT_NEGATIVE)
    ] = None
    seed: Annotated[int | None, Flag("For repeatable experiments.", default_text="entropy of the operating system")] = (
        None
    )


@dataclass(frozen=True)
class ComputeOptions:
    """The precision, compilation, device and memory of a step."""

    panel: ClassVar[str] = "How to run"

    microbatch: Annotated[
        int | None,
        Flag(
            "Samples computed at once, over all ranks. It changes only speed and memory, except with kfac, which "
            "measures the curvature on one microbatch. auto: the largest that fits into the memory of one GPU and is "
            "of use; 8 on a CPU; 32 with kfac, --compile step or --mesh.",
            default_text="auto",
            effect=KFAC_RESULT,
            range=COUNT,
            word_for_none="auto",
        ),
    ] = None
    dtype: Annotated[
        str,
        Flag(
            "float32 or bfloat16; auto: bfloat16 for a language model on a GPU that has it, else float32.",
            complete=choices.DTYPES,
        ),
    ] = "auto"
    sum_dtype: Annotated[
        str,
        Flag(
            "Dtype of the private sum over microbatches: float64, or float32, which takes half the memory and a little "
            "more noise (about 1 % for 64 microbatches).",
            needs=Needs.PRIVACY,
            complete=choices.SUM_DTYPES,
        ),
    ] = "float64"
    stored_dtype: Annotated[
        str,
        Flag(
            "Dtype in which --method auto may store samples' gradients until they are summed: full, that of --dtype; "
            "int8, rounded to 8 bits, which takes less memory and, at about 512 tokens, less time (bfloat16 on one "
            "Hopper GPU, with noise, which hides the rounding); auto: int8 where that is so and no --seed is given.",
            needs=Needs.METHOD_AUTO,
            effect=HOW,  # what a run has rounded before, it goes on to round: fdp.run.same_noise
            complete=choices.STORED_DTYPES,
        ),
    ] = "auto"
    compile: Annotated[
        str,
        Flag(
            "none; block compiles every kind of block once and uses kernels for the rest (starts quickly); step "
            "compiles one graph per microbatch and one for the update; auto: block with --cuda-graph for a language "
            "model in bfloat16 on a GPU, else none.",
            effect=HOW,
            complete=choices.COMPILE,
        ),
    ] = "auto"
    cuda_graph: Annotated[bool, Flag("Record the whole step once and replay it (GPU).", effect=HOW)] = False
    repeatable: Annotated[
        bool,
        Flag(
            "Compute gradients in one order of additions (GPU): a run with the same --seed and --microbatch then gives "
            "the same bits on the same GPU. A step of gpt2 takes 7 % longer.",
            effect=HOW,
        ),
    ] = False
    device: Annotated[str, Flag("auto, cpu or cuda.", effect=HOW, complete=choices.DEVICES)] = "auto"
    memory_budget: Annotated[
        float | None,
        Flag(
            "GiB that --method auto or flash may store between the norms and the sum.",
            effect=HOW,
            needs=Needs.BUDGETED_METHOD,
            range=POSITIVE,
        ),
    ] = None


@dataclass(frozen=True)
class OutputOptions:
    """The files a run writes and what it prints."""

    panel: ClassVar[str] = "How to run"

    save_every: Annotated[
        int | None,
        Flag("Steps between checkpoints in --out; the same command then resumes the run.", effect=HOW, range=COUNT),
    ] = None
    keep: Annotated[
        int, Flag("How many checkpoints to keep, the newest.", effect=HOW, needs=Needs.SAVING, range=COUNT)
    ] = 2
    out: Annotated[
        Path | None,
        Flag("Folder for the run's files.", default_text="runs/<model>-<data>-<n>", effect=HOW),
    ] = None
    quiet: Annotated[bool, Flag("Print nothing but errors.", effect=HOW)] = False
    as_json: Annotated[bool, Flag("Print the summary as one JSON object, last.", name="--json", effect=HOW)] = False


@dataclass(frozen=True)
class TrainOptions:
    """Every option of ``fdp train``."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    ledger: LedgerOptions = field(default_factory=LedgerOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    advice: AdviceOptions = field(default_factory=AdviceOptions)
    kfac: KfacOptions = field(default_factory=KfacOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)


def train_flag(key: str, **changes: str | None) -> Flag:
    """Return the declaration of an option of ``fdp train``, for another command that takes it too."""
    return options_of(TrainOptions)[key].flag._replace(**changes)
