"""Private logistic regression on scikit-learn's digits, with every line of the private step written out.

    python examples/logistic.py

You should see: test accuracy 0.946 at epsilon 3, delta 1e-5, give or take 0.004, after a few seconds. This is the mean
over five seeds; all values are in benchmarks/results/examples_neoverse-n1_202611.json.

This is Algorithm 1 of Abadi et al. 2016 (arXiv 1607.00133). Copy it and change a line. The loss can be any
function of (params, data) that returns one number per sample.
"""

import argparse

import torch
import torch.nn.functional as F

from fdp import keys, ops
from fdp.checks.model_checks import check_independent
from fdp.data.datasets import digits
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.per_sample import per_sample_norms
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

EPSILON, DELTA = 3.0, 1e-5  # the budget for one training image, over the whole run
BATCH_SIZE = 512  # expected: every image is drawn independently, with probability 512 / 1437
MICROBATCH_SIZE = 704  # rows, those that were not drawn are padding; more are drawn with probability 1e-30
MAX_NORM = 1.0
LEARNING_RATE = 2.0

parser = argparse.ArgumentParser(description="Private logistic regression on the digits.")
parser.add_argument("--steps", type=int, default=200, help="fewer steps need less noise for the same epsilon")
parser.add_argument("--seed", type=int, default=0, help="another number: other samples, other noise")
arguments = parser.parse_args()
steps = arguments.steps


def loss(params, data):
    """Cross-entropy of softmax(W x + b), one number per sample: never a mean over the batch."""
    logits = ops.linear(data["image"].flatten(1) - 0.5, params["weight"], params["bias"])
    return F.cross_entropy(logits, data["label"], reduction="none")


# 1. Data and model. The training images are protected. Parameters are a plain dict of tensors.
train, test = digits()
params = {"weight": torch.zeros(10, 64), "bias": torch.zeros(10)}
model = from_loss(loss, params)

# 2. The mechanism: sampling, clipping and as much noise as the budget requires. The accountant reads the same object.
sampling, clip = poisson(len(train), expected_batch_size=BATCH_SIZE), flat(max_norm=MAX_NORM)
z = noise_multiplier_for(sampling, clip, epsilon=EPSILON, delta=DELTA, steps=steps)
mechanism = Mechanism(sampling, clip, z)

# 3. The plan: how to compute per-sample norms for these shapes. If the loss uses operations outside fdp.ops, use
#    Method.MATERIALIZE.
example = train.fetch(torch.arange(MICROBATCH_SIZE).numpy())
plan = make_plan(model, params, example, method=Method.AUTO)
check_independent(model, params, example)  # no sample's loss depends on another sample
optimizer = sgd(LEARNING_RATE)
state = TrainState(params, optimizer.init(params), (), torch.tensor(0))

# 4. Train. One key serves the whole run: every draw folds in its purpose and the step. A fixed seed makes the number
#    above repeatable, but anyone who knows the seed knows the noise. To release a model, use keys.key(), which takes
#    256 bits from the operating system.
key = keys.key(arguments.seed)
for step in range(steps):
    batch = sample_batch(train, sampling, key, step=step, microbatch_size=MICROBATCH_SIZE)
    (mask,) = batch.mask  # one microbatch: an error if there are more
    data = {name: leaf[0] for name, leaf in batch.data.items()}

    losses, norms, stash = per_sample_norms(model, state.params, data, plan=plan)  # one forward, one backward
    factors = clip_to(norms, max_norm=MAX_NORM).masked(mask)  # padding gets factor 0
    total = clipped_sum(stash, factors)  # ClippedSum(value, sensitivity)
    noisy = add_gaussian(total, key=key, step=step, noise_multiplier=z)  # scaled by total.sensitivity
    mean = expected_mean(noisy, sampling)  # divide by the expected size, which is public, not by the number drawn
    updates, opt = optimizer.update(mean, state.opt, state.params)
    state = TrainState(apply_updates(state.params, updates), opt, state.clip, state.step + 1)

# 5. Result. Epsilon protects the training images only, not the test images.
logits = ops.linear(test.image.flatten(1) - 0.5, state.params["weight"], state.params["bias"])
accuracy = float((logits.argmax(1) == test.label).float().mean())
epsilon = spent(state, mechanism, delta=DELTA)  # the state counts the steps
print(f"test accuracy {accuracy:.3f} at epsilon {epsilon:.2f}, delta {DELTA:g}", end=" ")
print(f"({steps} steps, noise multiplier {z:.2f}, seed {arguments.seed})")
