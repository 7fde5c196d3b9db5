"""Fine-tune a model of ``transformers`` privately, with LoRA and in full; save both and load them again.

    python examples/finetune_hf.py

You should see: held-out loss 2.253 before; 2.093 with LoRA at epsilon 8, 1.957 in full at epsilon 8 (delta 1e-5), give
or take 0.01, after about 45 seconds on one core; and that ``AutoModelForCausalLM`` computes the same losses from both
folders. (Means over five seeds; all values are in benchmarks/results/examples_neoverse-n1_202611.json.)

Nothing is downloaded. The script makes a small GPT-2 over bytes and trains it without privacy on the source of Python's
standard library, which is public. The manual that ``help()`` shows plays the private text. A sample, the unit of
privacy, is one window of 65 bytes. Both private runs start from the public model. If you publish both results, you have
spent both budgets.
"""

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from fdp import keys
from fdp.data.datasets import load
from fdp.foreign.adapters.lora import lora, merge
from fdp.foreign.hub import hugging_face
from fdp.gradients.plan import make_plan
from fdp.optimizers import adamw, warmup_cosine
from fdp.privacy.accounting import noise_multiplier_for
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch
from fdp.run.spent import spent
from fdp.step import init_state, make_train_step

EPSILON, DELTA = 8.0, 1e-5  # the budget for one private window, in each of the two runs
CONTEXT, MICROBATCH_SIZE, MAX_NORM = 64, 32, 1.0
RANK, ALPHA = 8, 16.0
ADAPTED = ("transformer.h.*.attn.c_attn.weight", "transformer.h.*.mlp.c_fc.weight", "transformer.h.*.mlp.c_proj.weight")

parser = argparse.ArgumentParser(description="Private fine-tuning of a model in the format of transformers.")
parser.add_argument("--public-steps", type=int, default=150, help="steps of ordinary training")
parser.add_argument("--steps", type=int, default=30, help="steps of each private run")
parser.add_argument("--batch-size", type=int, default=64, help="samples per private step, expected")
parser.add_argument("--folder", type=Path, help="where models are saved; default: a temporary folder")
parser.add_argument("--seed", type=int, default=0, help="another number: other samples, other noise")
arguments = parser.parse_args()
logging.disable_progress_bar()
folder = arguments.folder or Path(tempfile.mkdtemp(prefix="fdp-"))
steps, batch_size = arguments.steps, arguments.batch_size

# Text as bytes. The last windows of the manual are held out: they are not trained on, so they need no protection.
public = load("stdlib", context=CONTEXT)
manual = load(Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py"), context=CONTEXT)
windows = manual.fetch(np.random.default_rng(0).permutation(len(manual)))["tokens"]
dataset, held_out = {"tokens": windows[:-128]}, {"tokens": windows[-128:]}


def losses_of(module, tokens):
    """Return the loss of every window, computed by the module itself."""
    logits = module(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def train_in_public(module):
    """Train without privacy and without fdp."""
    torch_optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    draw = np.random.default_rng(0)
    for _ in range(arguments.public_steps):
        tokens = public.fetch(draw.integers(len(public), size=16))["tokens"]
        torch_optimizer.zero_grad()
        losses_of(module, tokens).mean().backward()
        torch_optimizer.step()


def fine_tune(model, params, *, learning_rate, key):
    """Train the trainable leaves of ``model`` privately; return the new parameters and epsilon."""
    sampling, clip = poisson(len(dataset["tokens"]), expected_batch_size=batch_size), flat(max_norm=MAX_NORM)
    z = noise_multiplier_for(sampling, clip, epsilon=EPSILON, delta=DELTA, steps=steps)
    mechanism = Mechanism(sampling, clip, z)
    optimizer = adamw(warmup_cosine(learning_rate, warmup_steps=max(1, steps // 10), steps=steps + 1))
    plan = make_plan(model, params, {"tokens": dataset["tokens"][:MICROBATCH_SIZE]})
    train_step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
    state = init_state(model, params, optimizer, mechanism)
    for step in range(steps):
        batch = sample_batch(dataset, sampling, key, step=step, microbatch_size=MICROBATCH_SIZE)
        state, _ = train_step(state, batch, key)
    return state.params, spent(state, mechanism, delta=DELTA)


def loss_of(model, params):
    with torch.no_grad():
        return float(model.loss(params, held_out).mean())


# Someone else's model: a folder with config.json and model.safetensors.
start = time.perf_counter()
torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=CONTEXT, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
module = GPT2LMHeadModel(config)
train_in_public(module)
module.save_pretrained(folder / "public")

# Load the folder as a stack of blocks and a tree of parameters, with the module's own names. A fixed seed makes the
# numbers above repeatable, but anyone who knows the seed knows the noise. To release a model, use keys.key(), which
# takes 256 bits from the operating system.
model, params = hugging_face.load(folder / "public", context=CONTEXT)
key = keys.key(arguments.seed)
print(f"{model.name}: {len(model.blocks)} blocks, {len(model.leaves)} leaves", end=", ")
print(f"{sum(leaf.numel() for leaf in module.parameters()):,} parameters")
print(f"held-out loss {loss_of(model, params):.3f} before", flush=True)

# With LoRA: the model's leaves are frozen, adapters are trained, and finally merged into the leaves.
adapted, with_adapters = lora(model, params, rank=RANK, alpha=ALPHA, targets=ADAPTED, key=keys.fold_in(key, "lora"))
tuned, epsilon = fine_tune(adapted, with_adapters, learning_rate=1e-2, key=keys.fold_in(key, "private lora"))
merged = merge(tuned, alpha=ALPHA)
print(f"held-out loss {loss_of(model, merged):.3f} with LoRA at epsilon {epsilon:.2f}, delta {DELTA:g}", flush=True)

# In full: every leaf.
full, epsilon = fine_tune(model, params, learning_rate=3e-3, key=keys.fold_in(key, "private full"))
print(f"held-out loss {loss_of(model, full):.3f} in full at epsilon {epsilon:.2f}, delta {DELTA:g}", flush=True)

# Save both in the format of transformers and load them again.
for name, values in (("lora", merged), ("full", full)):
    hugging_face.save(folder / name, values, source=folder / "public")
    again = AutoModelForCausalLM.from_pretrained(folder / name).eval()
    with torch.no_grad():
        difference = float((losses_of(again, held_out["tokens"]) - model.loss(values, held_out)).abs().max())
    print(f"{folder / name}: reloaded, largest difference of a sample's loss {difference:.1e}")
print(f"{time.perf_counter() - start:.0f} s")
