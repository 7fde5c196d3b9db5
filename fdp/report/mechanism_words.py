"""The mechanism of a run in sentences that are true for every clipping style, method, optimizer and unit.

>>> describe_mechanism(facts)
('Every step draws ...', 'Every sample's gradient is ...', ...)
"""

from __future__ import annotations

from fdp import models
from fdp.privacy.clipping import COUNT_NOISE_SHARE
from fdp.privacy.shown_numbers import round_up, shown_epsilon
from fdp.report.run_facts import RunFacts, Status

ROUNDING = "1e-6"
"""The most that rounding in float64 adds to the sensitivity (docs/guarantees.md)."""

CLIPPING = {
    "flat": "The gradient of every drawn sample, over all trained parameters together, is scaled down to norm C = "
    "{c:g} if it is longer.",
    "per-layer": "The gradient of every drawn sample is scaled down parameter by parameter, each to its own share of "
    "the bound, so that all of it together has norm at most C = {c:g}.",
    "automatic": "The gradient of every drawn sample is multiplied by C / (its norm + 0.01), with C = {c:g}, so that "
    "its norm is below C, whatever it was.",
    "quantile": "The gradient of every drawn sample, over all trained parameters together, is scaled down to norm C if "
    "it is longer. C starts at {c:g} and follows the median of the norms, by a noised count that is released in every "
    "step together with the sum, with noise of standard deviation {count_noise:g}, and is part of the accounting.",
}


def describe_mechanism(facts: RunFacts) -> tuple[str, ...]:
    """Return the mechanism in sentences: sampling, clipping, noise, update, other releases."""
    settings, config = facts.settings, facts.config
    sizes = {"c": settings["max_norm"], "count_noise": settings["batch_size"] / COUNT_NOISE_SHARE}
    found = [
        "DP-SGD (Abadi et al. 2016, arXiv 1607.00133): every step draws samples, clips the gradient of each, adds "
        "Gaussian noise to their sum, and gives the noisy mean to the optimizer. The optimizer and everything after it "
        "see the data through these noisy sums only.",
        f"Sampling: in each step every sample is drawn independently with probability {config['sampling_rate']:.6g} = "
        f"{settings['batch_size']} / {config['population']} (actual Poisson sampling, not shuffling; the number drawn "
        f"varies from step to step). {_population(facts)}",
        f"Clipping ({settings['clip']}): {CLIPPING[settings['clip']].format(**sizes)} A sample whose gradient is not "
        f"finite contributes exactly 0. So adding or removing one sample moves the sum by at most C, up to rounding of "
        f"{ROUNDING} C.",
        f"Noise: Gaussian with standard deviation z C in every coordinate of the sum, noise multiplier z = "
        f"{round_up(config['noise_multiplier'], 6)}, added once per step.{_extra_noise(facts)} The sum is then divided "
        f"by the public number {settings['batch_size']}, not by the number of samples drawn.",
        f"Steps: {facts.promise.steps} planned; the run {facts.status.value}.{_steps_made(facts)}",
        f"Optimizer: {settings['optimizer']}, which works on the noisy mean; this is post-processing and costs "
        f"nothing.",
        *_curvature(facts),
        *_trained(facts),
    ]
    return tuple(found)


def _extra_noise(facts: RunFacts) -> str:
    extra = facts.config.get("extra_noise") or 0.0
    if not extra:
        return ""
    return (
        f" Partial sums are rounded to float32. The rounding moves the sum of one dataset against that of a "
        f"neighbouring one by at most {extra:.3g} C, so the noise is z C (1 + {extra:.3g})."
    )


def _population(facts: RunFacts) -> str:
    if facts.settings.get("population") is not None:
        return (
            f"{facts.config['population']} is a number that was announced as public; the number of samples is private."
        )
    return (
        f"{facts.config['population']} is the number of samples rounded up to two digits and a multiple of 10, and "
        f"treated as public; the exact number is private. If one more sample pushed the count past a rounding step, "
        f"the rate would show it."
    )


def _steps_made(facts: RunFacts) -> str:
    if facts.steps_made is None or facts.promise.steps is None or facts.steps_made >= facts.promise.steps:
        return ""
    said = f" {facts.steps_made} were made. The stated epsilon is that of all planned steps, since what the run showed "
    said += "may have led to the stop."
    if facts.epsilon_as_made is not None and facts.status is Status.STOPPED:
        alone = "" if facts.total == facts.promise else " of this run alone"
        said += (
            f" If the number of steps was decided before the run, epsilon{alone} is "
            f"{shown_epsilon(facts.epsilon_as_made)}."
        )
    return said


def _curvature(facts: RunFacts) -> tuple[str, ...]:
    if facts.settings["optimizer"] != "kfac":
        return ()
    source = facts.settings.get("kfac_data")
    measured = {
        "synthetic": "measured on synthetic samples, which hold nothing of the data",
        "noised": "measured on the private data, clipped and noised; these releases are part of the accounting",
    }.get(str(source), "measured on data that was given as public")
    return (
        f"Preconditioning (K-FAC): gradients are multiplied by an estimate of the inverse curvature before they are "
        f"clipped, so that C bounds the preconditioned gradient. The curvature is {measured}.",
    )


def _trained(facts: RunFacts) -> tuple[str, ...]:
    settings, folder = facts.settings, facts.settings["model"]
    part = "all parameters"
    if settings.get("lora") is not None:
        part = f"LoRA adapters of rank {settings['lora']}; everything else is as it was"
    elif settings.get("prefix") is not None:
        part = "the keys and values of virtual tokens; everything else is as it was"
    elif settings.get("train_only") is not None:
        part = "some of the parameters; everything else is as it was"
    said = f"Trained: {part}."
    if settings.get("public_data") is not None:
        said += " Samples that were given as public are among the samples, and are treated as the private ones are."
    if folder not in models.PRESETS or facts.before:
        said += (
            " The first parameters came from an earlier training. The guarantee of this run says nothing about the "
            "data of that training, unless it is composed in this statement."
        )
    return (said,)
