"""Train a layer of your own privately: first it is refused, then it gets a rule, then it is trained.

    python examples/own_layer.py

You should see: the refusal, a wrong rule caught by the checker, and test accuracy 0.921 at epsilon 4, delta 1e-4, give
or take 0.01, after a few seconds on one core. (The mean over five seeds; all values are in
benchmarks/results/examples_neoverse-n1_202611.json.)

**What fdp needs to know about an operation.** DP-SGD clips every sample's gradient. So for each parameter fdp must know
every sample's gradient ``G_b``, or at least its norm and any weighted sum over samples. For the operations of torch it
does. Here is a layer that compares inputs with learned prototypes by distance,

    y_bm = -temperature |x_b - W_m|^2 / 2 + ... = temperature (x_b . W_m - |W_m|^2 / 2)      x (batch, d), W (m, d)

(without |x|^2, which is the same for all m). The term |W|^2 uses only operations that fdp knows. Suppose that the
products come from a kernel of your own. To fdp they are one unknown operation, and ``from_module`` refuses it. The
error names the leaf, the operation, the shapes and the remedies. If fdp skipped the operation instead, a sample would
have no bound.

**What a rule is.** ``record(x, g, shape)`` gets the input of one use, the gradient ``g`` of the loss with respect to
its output (same shape as y) and the parameter's shape; samples are dim 0. It returns what this use contributes to every
sample's gradient, in one of two forms:

- ``Dense(gradient)``: ``G_b`` itself, (batch, *shape). This is always possible and costs one gradient per sample.
- ``Pair(left, right, shape)``: ``G_b = left_b^T right_b``, with left (batch, groups, tokens, rows) and right (batch,
  groups, tokens, columns). If a gradient is a sum of outer products over tokens, norms and sums can be computed from
  the pair without ever forming ``G_b``. ``rows(x)`` brings any input into that shape.

For the products, dL/dW = temperature g^T x: an outer product per sample, so a ``Pair``. A record does not get W. If a
gradient depends on W, split the operation as here, so that the part with a rule is linear in W.

**What the checker compares.** ``@fdp.rule(operation, example=(x, weight))`` runs ``fdp.check_rule`` on the example in
float64, with a random output gradient. It checks that samples do not mix, and compares the per-sample gradient, its
norm, its norm from Gram matrices, the cross term of two uses, and a weighted sum (with one weight zero) with
``vmap(grad)`` of the forward. A rule that fails is not registered. Use odd and different sizes, so that no transposed
dimension goes unnoticed.

**If there is no structure**, ``from_module(module, materialize=("prototypes.weight",))`` computes the gradients of the
block that holds the leaf one sample at a time. This is exact and slower, and needs no rule.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fdp
from fdp import keys, tree
from fdp.data.datasets import digits
from fdp.gradients.rules import Pair, rows
from fdp.optimizers import adam
from fdp.privacy.accounting import noise_multiplier_for
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch
from fdp.run.spent import spent

EPSILON, DELTA = 4.0, 1e-4
MICROBATCH_SIZE, BATCH_SIZE, MAX_NORM = 64, 128, 1.0

parser = argparse.ArgumentParser(description="Train a layer of your own, with a rule.")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--seed", type=int, default=0, help="another number: other samples, other noise")
arguments = parser.parse_args()
steps = arguments.steps

train, test = (part.fetch(np.arange(len(part))) for part in digits())
torch.manual_seed(0)


class Prototypes(nn.Module):
    """Scores by distance to learned prototypes, at temperature 4."""

    def __init__(self, inputs, classes, products):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(classes, inputs))
        self.products = products

    def forward(self, x):
        return self.products(x, self.weight, temperature=4.0) - 2.0 * self.weight.square().sum(1)


class Classifier(nn.Module):
    """A hidden layer, and prototypes of classes in its space."""

    def __init__(self, products):
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.prototypes = Prototypes(32, 10, products)

    def forward(self, image):
        return self.prototypes(F.gelu(self.hidden(image.flatten(1))))


def cross_entropy(scores, data):
    return F.cross_entropy(scores, data["label"], reduction="none")


# 1. fdp sees one operation, whatever is inside. It has no rule, so it is refused.
@fdp.operation
def products(x, weight, *, temperature):
    """``temperature x W^T``."""
    return temperature * torch.einsum("bd,md->bm", x, weight)


example = {"image": train["image"][:5], "label": train["label"][:5]}
try:
    fdp.from_module(Classifier(products), loss=cross_entropy, example=example)
except fdp.FdpError as refused:
    print(f"refused: {refused}\n")

# 2. A wrong rule, which forgets the temperature, is caught.
some = torch.randn(5, 7), torch.randn(3, 7)  # 5 samples of 7 numbers, 3 prototypes
try:

    @fdp.rule(products, example=some, temperature=4.0)
    def forgetful(x, g, shape, *, temperature):
        return Pair(rows(g), rows(x), shape)

except fdp.FdpError as caught:
    print(f"caught: {caught}\n")


@fdp.rule(products, example=some, temperature=4.0)
def record(x, g, shape, *, temperature):
    """dL/dW = temperature g^T x."""
    return Pair(rows(temperature * g), rows(x), shape)


# 3. Train. from_module compares every leaf's norms on the example with those of each sample alone.
model, params = fdp.from_module(Classifier(products), loss=cross_entropy, example=example)
sampling, clip = poisson(len(train["label"]), expected_batch_size=BATCH_SIZE), flat(max_norm=MAX_NORM)
z = noise_multiplier_for(sampling, clip, epsilon=EPSILON, delta=DELTA, steps=steps)
mechanism, optimizer = Mechanism(sampling, clip, z), adam(1e-2)
plan = fdp.make_plan(model, params, {name: leaf[:MICROBATCH_SIZE] for name, leaf in train.items()})
train_step = fdp.make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
state = fdp.init_state(model, params, optimizer, mechanism)
key = keys.key(arguments.seed)  # a fixed seed makes the number repeatable; to release a model, use keys.key()
for step in range(steps):
    batch = sample_batch(train, sampling, key, step=step, microbatch_size=MICROBATCH_SIZE)
    state, _ = train_step(state, batch, key)

with torch.no_grad():
    scores = torch.func.functional_call(Classifier(products), tree.flatten(state.params), (test["image"],))
accuracy = float((scores.argmax(1) == test["label"]).float().mean())
epsilon = spent(state, mechanism, delta=DELTA)
print(f"test accuracy {accuracy:.3f} at epsilon {epsilon:.2f}, delta {DELTA:g} ({steps} steps, seed {arguments.seed})")
