"""A small private GPT on the source of Python's standard library, with the private step written out.

    python examples/nano_gpt.py

You should see: held-out loss 2.928 at epsilon 8, delta 1e-6, down from about 5.4, give or take 0.02, after a minute
and a half on two cores. (In nats per byte, the mean over five seeds; all values are in
benchmarks/results/examples_neoverse-n1_202611.json. Byte frequencies alone give 3.16. A good private model takes more
than a minute: 40 steps of 64 windows see 4 % of the text.)

A sample, the unit of privacy, is one window of 129 bytes. Copy ``train_step`` and change a line.
"""

import argparse
import time
from functools import reduce

import numpy as np
import torch

from fdp import keys, models, tree
from fdp.data.datasets import load
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.lazy_sum import add_sums
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.optimizers import adamw, apply_updates, warmup_cosine
from fdp.privacy.accounting import noise_multiplier_for
from fdp.privacy.clipping import clip_to, flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import add_gaussian, expected_mean
from fdp.privacy.sampling import poisson, sample_batch
from fdp.run.spent import spent
from fdp.types import TrainState

EPSILON, DELTA = 8.0, 1e-6  # the budget for one window of the text, over the whole run
MICROBATCH_SIZE = 16  # samples computed at once; changes only memory and speed
MAX_NORM = 1.0
LEARNING_RATE = 4e-3

parser = argparse.ArgumentParser(description="A small private GPT on the standard library.")
parser.add_argument("--steps", type=int, default=40, help="fewer steps need less noise for the same epsilon")
parser.add_argument("--batch-size", type=int, default=64, help="samples per step, expected")
parser.add_argument("--seed", type=int, default=0, help="another number: other samples, other noise")
arguments = parser.parse_args()
steps, batch_size = arguments.steps, arguments.batch_size

# Text as bytes. The last windows are held out: they are not trained on, so they need no protection.
windows = load("stdlib", context=128)
everything = windows.fetch(np.random.default_rng(0).permutation(len(windows)))["tokens"]
dataset, held_out = {"tokens": everything[:-128]}, {"tokens": everything[-128:]}

# The mechanism: sampling, clipping, noise. The sampler, the step and the accountant read this one object.
sampling, clip = poisson(len(dataset["tokens"]), expected_batch_size=batch_size), flat(max_norm=MAX_NORM)
z = noise_multiplier_for(sampling, clip, epsilon=EPSILON, delta=DELTA, steps=steps)
mechanism = Mechanism(sampling, clip, z)

# 4 layers of width 128, head tied to the embedding; parameters by path, {"blocks.0.qkv": tensor, ...}. A fixed seed
# makes the number above repeatable, but anyone who knows the seed knows the noise. To release a model, use
# keys.key(), which takes 256 bits from the operating system.
model = models.build("gpt-nano")
key = keys.key(arguments.seed)
params = tree.flatten(model.init(keys.fold_in(key, "init")))
optimizer = adamw(warmup_cosine(LEARNING_RATE, warmup_steps=max(1, steps // 10), steps=steps + 1))
example = {"tokens": dataset["tokens"][:MICROBATCH_SIZE]}
plan = make_plan(model, params, example, method=Method.AUTO)  # fdp.gradients.plan.explain(plan) prints the choices


def train_step(state, batch, key):
    """One step of DP-SGD, with Adam after the noise."""
    parts = []
    for tokens, mask in zip(batch.data["tokens"], batch.mask):
        _, norms, stash = per_sample_norms(model, state.params, {"tokens": tokens}, plan=plan)
        factors = clip_to(norms, max_norm=MAX_NORM).masked(mask)  # padding gets factor 0
        parts.append(clipped_sum(stash, factors))
    total = reduce(add_sums, parts)  # microbatches hold different samples: the sensitivity stays C
    noisy = add_gaussian(total, key=key, step=state.step, noise_multiplier=z)  # once, scaled by total.sensitivity
    mean = expected_mean(noisy, sampling)  # divide by the expected size, which is public, not by the number drawn
    updates, opt = optimizer.update(mean, state.opt, state.params)
    return TrainState(apply_updates(state.params, updates), opt, state.clip, state.step + 1)


def held_out_loss():
    with torch.no_grad():
        return float(model.loss(state.params, held_out).mean())


state = TrainState(params, optimizer.init(params), (), torch.tensor(0))
start = time.perf_counter()
for step in range(steps):
    if step % 10 == 0:
        seconds = time.perf_counter() - start
        print(f"step {step:3d}   held-out loss {held_out_loss():.3f}   {seconds:3.0f} s", flush=True)
    batch = sample_batch(dataset, sampling, key, step=step, microbatch_size=MICROBATCH_SIZE)
    state = train_step(state, batch, key)  # one key for the run: draws fold in purpose and step

epsilon = spent(state, mechanism, delta=DELTA)  # the state counts the steps
print(f"held-out loss {held_out_loss():.3f} at epsilon {epsilon:.2f}, delta {DELTA:g}", end=" ")
print(f"({steps} steps, noise multiplier {z:.2f}, seed {arguments.seed})")
