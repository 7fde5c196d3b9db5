"""Private logistic regression on scikit-learn's digits, with every line of the private step written out.

    python examples/logistic.py

You should see: test accuracy 0.944 at epsilon 3, delta 1e-5, after a few seconds.

This is Algorithm 1 of Abadi et al. 2016 (arXiv 1607.00133); copy it and change a line. The loss can be any
function of (params, data) that returns one number per sample.
"""

import argparse

import torch
import torch.nn.functional as F

from fdp import keys, ops
from fdp.checks.model_checks import check_independent
from fdp.data.datasets import digits
from fdp.gradients.per_sample import clipped_sum, per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.model import from_loss
from fdp.optimizers import apply_updates, sgd
from fdp.privacy.accounting import noise_multiplier_for
from fdp.privacy.clipping import clip_to, flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import add_gaussian, expected_mean
from fdp.privacy.sampling import poisson, sample_batch
from fdp.run.spent import spent
from fdp.types import TrainState

EPSILON, DELTA = 3.0, 1e-5  # what one image of the training set may cost, over the whole run
BATCH_SIZE = 512  # expected: every image is drawn on its own, with probability 512 / 1437
MAX_NORM = 1.0
LEARNING_RATE = 2.0

parser = argparse.ArgumentParser(description="Private logistic regression on the digits.")
parser.add_argument("--steps", type=int, default=200, help="fewer steps need less noise for the same epsilon")
steps = parser.parse_args().steps


def loss(params, data):
    """Cross-entropy of softmax(W x + b), one number per sample: never a mean over the batch."""
    logits = ops.linear(data["image"].flatten(1) - 0.5, params["weight"], params["bias"])
    return F.cross_entropy(logits, data["label"], reduction="none")


# 1. Data and model. The training images are what is protected; parameters are a plain dict of tensors.
train, test = digits()
params = {"weight": torch.zeros(10, 64), "bias": torch.zeros(10)}
model = from_loss(loss, params)

# 2. The mechanism: sampling, clipping and as much noise as the budget asks for. One object, read by all.
sampling, clip = poisson(len(train), expected_batch_size=BATCH_SIZE), flat(max_norm=MAX_NORM)
z = noise_multiplier_for(sampling, clip, epsilon=EPSILON, delta=DELTA, steps=steps)
mechanism = Mechanism(sampling, clip, z)

# 3. How per-sample norms are computed for these shapes: one microbatch of 1437 rows holds any draw, padded.
#    For a loss that uses other operations than those of fdp.ops: Method.MATERIALIZE.
example = train.fetch(torch.arange(len(train)).numpy())
plan = make_plan(model, params, example, method=Method.AUTO)
check_independent(model, params, example)  # no sample's loss depends on another sample
optimizer = sgd(LEARNING_RATE)
state = TrainState(params, optimizer.init(params), (), torch.tensor(0))

# 4. Train. One key for the whole run: what draws from it folds in its purpose and the step. A fixed seed makes the
#    number above repeatable, and the noise known to whoever reads it. To release a model, keys.key() takes 256 bits
#    from the operating system.
key = keys.key(0)
for step in range(steps):
    batch = sample_batch(train, sampling, key, step=step, microbatch_size=len(train))
    data, mask = {name: leaf[0] for name, leaf in batch.data.items()}, batch.mask[0]

    losses, norms, stash = per_sample_norms(model, state.params, data, plan=plan)  # one forward, one backward
    factors = clip_to(norms, max_norm=MAX_NORM).masked(mask)  # padding counts for nothing
    total = clipped_sum(stash, factors)  # ClippedSum(value, sensitivity)
    noisy = add_gaussian(total, key=key, step=step, noise_multiplier=z)  # scaled by total.sensitivity
    mean = expected_mean(noisy, sampling)  # over the expected size, which is public; not how many were drawn
    updates, opt = optimizer.update(mean, state.opt, state.params)
    state = TrainState(apply_updates(state.params, updates), opt, state.clip, state.step + 1)

# 5. Result. The test images are not protected: only the training set is behind the epsilon.
logits = ops.linear(test.image.flatten(1) - 0.5, state.params["weight"], state.params["bias"])
accuracy = float((logits.argmax(1) == test.label).float().mean())
epsilon = spent(state, mechanism, delta=DELTA)  # counted by the state: every step that made it
print(f"test accuracy {accuracy:.3f} at epsilon {epsilon:.2f}, delta {DELTA:g}", end=" ")
print(f"({steps} steps, noise multiplier {z:.2f}, fixed seed)")
