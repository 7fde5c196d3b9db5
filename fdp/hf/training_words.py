"""``TrainingArguments`` of transformers as arguments of :func:`fdp.private`.

    per_device_train_batch_size x gradient_accumulation_steps    the expected batch size
    per_device_train_batch_size                                  samples computed at once
    num_train_epochs, max_steps                                  epochs, steps
    learning_rate, lr_scheduler_type, warmup_steps               the learning rate at every step
    optim, weight_decay, adam_beta1, adam_beta2, adam_epsilon    the optimizer
    max_grad_norm                                                the clipping norm of one sample's gradient
    bf16, torch_compile, use_cpu                                 how it is computed

``seed`` is not used: its default is public, and whoever knows the seed of the noise can subtract it. Words that would
change nothing, or something else than they say, are refused by name.

    >>> words = training_words(args, steps=300)
    >>> run = fdp.private(model, dataset, epsilon=3, **words)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fdp import optimizers
from fdp.optimizers import Optimizer, Schedule
from fdp.types import FdpError

REFUSED = {
    "fp16": "use bf16=True: float16 would need loss scaling, which depends on the data",
    "dataloader_drop_last": "leave it out: Poisson sampling has no last batch",
    "group_by_length": "leave it out: batches are drawn at random, whatever the lengths",
    "auto_find_batch_size": "leave it out: memory decides the microbatch only, never the batch",
    "label_smoothing_factor": "leave it out, or use fdp.private with a loss of your own",
    "neftune_noise_alpha": "leave it out: the gradients are noised already",
    "load_best_model_at_end": "leave it out: choosing by an evaluation uses data outside the guarantee",
    "push_to_hub": "leave it out, and push the folder of save_model yourself",
    "fsdp": "leave it out: fdp shards by itself, see mesh= of fdp.private",
    "deepspeed": "leave it out: fdp shards by itself, see mesh= of fdp.private",
    "use_liger_kernel": "leave it out: fdp has kernels of its own",
    "optim_target_modules": "leave it out, and freeze parameters with requires_grad_(False)",
    "full_determinism": "leave it out: a run with noise_seed= repeats bit for bit on the same machine",
}
"""Words that private training does not have, and the remedy."""
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


def check_words(args: Any) -> None:
    """Refuse the words that private training does not have, each by its name."""
    for name, remedy in REFUSED.items():
        if getattr(args, name, None):
            raise FdpError(
                f"TrainingArguments {name}: expected it not to be set, got {getattr(args, name)!r}; {remedy}"
            )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if str(getattr(strategy, "value", strategy)) != "random":
        raise FdpError(
            f"TrainingArguments train_sampling_strategy: expected 'random', got {strategy!r}; batches are drawn by "
            f"Poisson sampling, on which epsilon depends"
        )
    if _schedule_name(args) not in SCHEDULES:
        raise FdpError(
            f"TrainingArguments lr_scheduler_type: expected one of {', '.join(SCHEDULES)}, got "
            f"{_schedule_name(args)!r}; or give the optimizer of PrivateTrainer a schedule of fdp.optimizers"
        )


def expected_batch_size(args: Any) -> int:
    """Return how many samples a step draws on average."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps


def count_steps(args: Any, population: int) -> int:
    """Return ``max_steps``, or the steps of all epochs."""
    if args.max_steps > 0:
        return args.max_steps
    return max(1, math.ceil(args.num_train_epochs * population / expected_batch_size(args)))


def training_words(args: Any, *, steps: int) -> dict[str, Any]:
    """Return the arguments of :func:`fdp.private` that ``args`` stand for."""
    check_words(args)
    return {
        "steps": steps,
        "batch_size": expected_batch_size(args),
        "microbatch": min(args.per_device_train_batch_size, expected_batch_size(args)),
        "optimizer": _make_optimizer(args, make_schedule(args, steps=steps)),
        "max_norm": args.max_grad_norm,
        "dtype": torch.bfloat16 if args.bf16 else torch.float32,
        "compile": "block" if args.torch_compile else "none",
        "device": _device(args),
    }


def make_schedule(args: Any, *, steps: int) -> Schedule:
    """Return the learning rate as a function of the step, after a linear warm-up."""
    warmup = warmup_steps(args, steps=steps)
    left, peak, name = max(1, steps - warmup), args.learning_rate, _schedule_name(args)
    if name == "linear":
        schedule = optimizers.linear(peak, 0.0, steps=left)
    elif name == "cosine":
        schedule = optimizers.cosine(peak, steps=left)
    else:
        schedule = optimizers.constant(peak)
    return optimizers.warmup(schedule, steps=warmup) if warmup else schedule


def warmup_steps(args: Any, *, steps: int) -> int:
    """Return the steps of warm-up: a number, or a share of all steps."""
    given = args.warmup_steps or getattr(args, "warmup_ratio", None) or 0
    return math.ceil(given * steps) if 0 < given < 1 else int(given)


def _make_optimizer(args: Any, rate: Schedule) -> Optimizer:
    name = str(getattr(args.optim, "value", args.optim))
    adam = {"b1": args.adam_beta1, "b2": args.adam_beta2, "eps": args.adam_epsilon}
    if name.startswith("adamw_torch"):
        return optimizers.adamw(rate, weight_decay=args.weight_decay, **adam)
    if name in ("sgd", "adafactor"):
        return {"sgd": optimizers.sgd, "adafactor": optimizers.adafactor}[name](rate, weight_decay=args.weight_decay)
    raise FdpError(
        f"TrainingArguments optim: expected adamw_torch, sgd or adafactor, got {name!r}; or give PrivateTrainer an "
        f"optimizer of fdp.optimizers"
    )


def _schedule_name(args: Any) -> str:
    return str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))


def _device(args: Any) -> str:
    return "cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu"
