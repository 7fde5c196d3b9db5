"""Options by the names that other tools give them, and what fdp calls them.

fdp train --max-grad-norm 1                         # no such option --max-grad-norm: fdp calls it --max-norm

Names of Hugging Face's ``TrainingArguments`` and ``LoraConfig``, of Opacus, and short forms.
"""

from __future__ import annotations

from collections.abc import Collection

MEANT = {
    "--learning-rate": "--lr",
    "--batch": "--batch-size",
    "--bs": "--batch-size",
    "--train-batch-size": "--batch-size",
    "--expected-batch-size": "--batch-size",
    "--logical-batch-size": "--batch-size",
    "--physical-batch-size": "--microbatch",
    "--max-physical-batch-size": "--microbatch",
    "--micro-batch-size": "--microbatch",
    "--microbatch-size": "--microbatch",
    "--per-device-train-batch-size": "--microbatch",
    "--per-device-batch-size": "--microbatch",
    "--max-grad-norm": "--max-norm",
    "--max-per-sample-grad-norm": "--max-norm",
    "--clip-norm": "--max-norm",
    "--clipping-norm": "--max-norm",
    "--clipping-threshold": "--max-norm",
    "--l2-norm-clip": "--max-norm",
    "--grad-clip": "--max-norm",
    "--clipping": "--clip",
    "--clip-style": "--clip",
    "--target-epsilon": "--epsilon",
    "--eps": "--epsilon",
    "--target-delta": "--delta",
    "--noise": "--noise-multiplier",
    "--sigma": "--noise-multiplier",
    "--noise-scale": "--noise-multiplier",
    "--sample-size": "--population",
    "--num-samples": "--population",
    "--dataset-size": "--population",
    "--output-dir": "--out",
    "--output": "--out",
    "--out-dir": "--out",
    "--save-dir": "--out",
    "--num-epochs": "--epochs",
    "--num-train-epochs": "--epochs",
    "--epoch": "--epochs",
    "--max-steps": "--steps",
    "--num-steps": "--steps",
    "--num-train-steps": "--steps",
    "--iterations": "--steps",
    "--max-iters": "--steps",
    "--save-steps": "--save-every",
    "--save-total-limit": "--keep",
    "--lr-scheduler-type": "--schedule",
    "--lr-scheduler": "--schedule",
    "--scheduler": "--schedule",
    "--lr-schedule": "--schedule",
    "--warmup-steps": "--warmup",
    "--num-warmup-steps": "--warmup",
    "--optim": "--optimizer",
    "--wd": "--weight-decay",
    "--model-name": "--model",
    "--model-name-or-path": "--model",
    "--model-path": "--model",
    "--pretrained": "--model",
    "--dataset": "--data",
    "--dataset-name": "--data",
    "--train-file": "--data",
    "--data-path": "--data",
    "--data-dir": "--data",
    "--text-column": "--field",
    "--text-field": "--field",
    "--dataset-text-field": "--field",
    "--user-column": "--user-field",
    "--user-id": "--user-field",
    "--block-size": "--context",
    "--seq-len": "--context",
    "--sequence-length": "--context",
    "--max-length": "--context",
    "--max-seq-length": "--context",
    "--rank": "--lora",
    "--lora-r": "--lora",
    "--lora-rank": "--lora",
    "--use-lora": "--lora",
    "--target-modules": "--lora-targets",
    "--lora-target-modules": "--lora-targets",
    "--torch-compile": "--compile",
    "--torch-dtype": "--dtype",
    "--precision": "--dtype",
    "--nproc-per-node": "--nproc",
    "--num-processes": "--nproc",
    "--num-gpus": "--nproc",
    "--gpus": "--nproc",
    "--world-size": "--nproc",
    "--gradient-checkpointing": "--checkpoint-activations",
    "--activation-checkpointing": "--checkpoint-activations",
    "--cpu-offload": "--offload",
    "--config-file": "--config",
    "--print-config": "--show-config",
    "--random-seed": "--seed",
}
"""Options of other tools by the option of fdp that means the same."""

NO_FLOAT16 = (
    "float16 overflows at 65504, so it needs a loss scale that changes from step to step with the data; bfloat16 has "
    "the range of float32 and needs none"
)
RESUME = "give the same --out and --save-every again, and the run resumes from its last checkpoint"
WHY = {
    "--bf16": "fdp calls it --dtype bfloat16",
    "--fp32": "fdp calls it --dtype float32",
    "--fp16": f"use --dtype bfloat16. {NO_FLOAT16}",
    "--gradient-accumulation-steps": (
        "fdp accumulates by itself: --batch-size is the batch of a step, --microbatch is what fits at once"
    ),
    "--warmup-ratio": "fdp counts steps: --warmup N; the default is a tenth of the steps",
    "--cpu": "fdp calls it --device cpu",
    "--use-cpu": "fdp calls it --device cpu",
    "--no-cuda": "fdp calls it --device cpu",
    "--cuda": "fdp calls it --device cuda",
    "--gpu": "fdp calls it --device cuda; several GPUs: --nproc N",
    "--resume": RESUME,
    "--resume-from-checkpoint": RESUME,
    "--overwrite-output-dir": "fdp never overwrites a run: give another --out",
    "--fsdp": "fdp calls it --nproc N --zero 3",
    "--deepspeed": "fdp has ZeRO built in: --nproc N --zero 3",
    "--poisson-sampling": "fdp always samples this way; leave it out",
    "--secure-mode": "fdp's noise always comes from a cryptographic generator; leave it out",
    "--secure-rng": "fdp's noise always comes from a cryptographic generator; leave it out",
    "--grad-sample-mode": "fdp calls it --method: auto, ghost, ghost_bk, flash, flash_bk or materialize",
    "--clipping-mode": "fdp calls it --method (ghost, flash, ...) or --clip (flat, per-layer, automatic, quantile)",
    "--accountant": "fdp train accounts with PLD, and fdp epsilon --accountant compares it with RDP; leave it out",
    "--disable-dp": "fdp calls it --method none",
    "--no-dp": "fdp calls it --method none",
    "--non-private": "fdp calls it --method none",
    "--shuffle": "fdp samples every batch at random, which the guarantee needs; leave it out",
    "--num-workers": "fdp reads the data in the training process; leave it out",
}
"""Options of other tools that have no counterpart of one word, and what to do."""


COMMANDS = {
    "resume": "fdp train resumes: give the command that began the run, with the same --out and --save-every",
    "continue": "fdp train resumes: give the command that began the run, with the same --out and --save-every",
    "extend": "fdp train --extend RUN goes on from a finished run",
    "finetune": "fdp train --model FOLDER trains a model of transformers",
    "check-data": "fdp inspect --data FILE tells what is in data",
    "data": "fdp inspect --data FILE tells what is in data",
    "tune": "fdp search chooses settings by held-out loss",
    "evaluate": "fdp train --eval-fraction 0.1 evaluates a run while it trains",
    "eval": "fdp train --eval-fraction 0.1 evaluates a run while it trains",
    "sample": "fdp generate RUN --prompt TEXT writes text",
    "version": "fdp --version prints it",
    "help": "fdp --help lists the commands, and fdp COMMAND --help its options",
}
"""Commands that people try, and what to type."""


def answer_command(word: str) -> str | None:
    """Return what to type for a command that fdp does not have; None if it is unknown."""
    known = COMMANDS.get(word.replace("_", "-").lower())
    return None if known is None else f"no such command {word}: {known}"


def answer(option: str, flags: Collection[str]) -> str | None:
    """Return what fdp calls an option of another tool; None if it is unknown, or the command has no counterpart."""
    name = option.split("=")[0].replace("_", "-").lower()
    if name in WHY and ("--lr" in flags or any(flag in WHY[name] for flag in flags if flag != "--help")):
        return f"no such option {option}: {WHY[name]}"
    meant = MEANT.get(name, name)
    if meant != option and meant in flags:
        return f"no such option {option}: fdp calls it {meant}"
    return None
