"""Make a folder to try fdp on: a small model in the format of ``transformers``, and notes about invented people.

    python examples/make_notes.py              # writes clinic/model and clinic/notes.jsonl, in about half a minute

You should see: 600 patients, 1,736 notes; and a public model of 141,056 parameters.

Nothing is downloaded, and nobody is real. ``clinic/notes.jsonl`` has one note per line,

    {"patient": "p0417", "date": "2025-03-09", "text": "Follow-up for asthma. ..."}

from 1 to 14 per patient, most of them short, a few longer than the model's 128 tokens. ``clinic/model`` is a GPT-2 with
two layers and a tokenizer of its own. Both were trained here, without privacy, on public text: sentences of a textbook,
some of them in the form of a note, about nobody. So the model can write a little, and has seen none of the notes.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

parser = argparse.ArgumentParser(description="A small model folder and a file of notes about invented people.")
parser.add_argument("--folder", type=Path, default=Path("clinic"), help="where both are written")
parser.add_argument("--patients", type=int, default=600)
parser.add_argument("--public-steps", type=int, default=200, help="steps of ordinary training of the public model")
arguments = parser.parse_args()
logging.disable_progress_bar()

CONTEXT, VOCABULARY = 128, 512
CONDITIONS = ["asthma", "migraine", "back pain", "high blood pressure", "a sprained ankle", "eczema", "diabetes", "flu"]
SYMPTOMS = ["cough", "headache", "pain at night", "dizziness", "swelling", "itching", "thirst", "fever", "tiredness"]
REMEDIES = [
    "an inhaler",
    "rest",
    "physiotherapy",
    "ten milligrams daily",
    "a cold compress",
    "an ointment",
    "more water",
]
NAMES = ["Ann", "Bela", "Chidi", "Dana", "Emre", "Fatou", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mira", "Noor"]
TEXTBOOK = [
    "{condition} often comes with {symptom}.",
    "A patient with {symptom} may have {condition}.",
    "For {condition}, doctors suggest {remedy}.",
    "If {symptom} does not improve, try {remedy}.",
    "{remedy} helps against {symptom} in most people.",
    "The first sign of {condition} is {symptom} or {symptom2}.",
]
NOTES = [
    "Follow-up for {condition}.",
    "{name} reports {symptom} for {days} days.",
    "No {symptom} since the last visit.",
    "Advised {remedy}, return in {days} days.",
    "{name} slept well, less {symptom}.",
    "Started {remedy} because of {symptom} and {symptom2}.",
    "Family history of {condition}.",
]


def sentence(draw, templates, name=""):
    """Return one sentence with its blanks filled."""
    words = {
        "condition": draw.choice(CONDITIONS),
        "symptom": draw.choice(SYMPTOMS),
        "symptom2": draw.choice(SYMPTOMS),
        "remedy": draw.choice(REMEDIES),
        "days": draw.integers(2, 30),
        "name": name,
    }
    text = str(draw.choice(templates)).format(**words)
    return text[0].upper() + text[1:]


def notes_of(draw, number):
    """Return all notes of one patient, as records."""
    name = str(draw.choice(NAMES))
    records = []
    for _ in range(min(14, draw.geometric(1 / 3))):
        length = min(60, draw.geometric(0.3))  # sentences; a few notes are far longer than the others
        text = " ".join(sentence(draw, NOTES, name) for _ in range(length))
        date = f"2025-{draw.integers(1, 13):02d}-{draw.integers(1, 29):02d}"
        records.append({"patient": f"p{number:04d}", "date": date, "text": text})
    return records


def train_tokenizer(texts):
    """Return a byte-level BPE tokenizer, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>", model_max_length=CONTEXT
    )


def train_in_public(module, tokens, draw):
    """Train without privacy and without fdp, on windows of public tokens."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(arguments.public_steps):
        starts = draw.integers(len(tokens) - CONTEXT, size=8)
        rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
        optimizer.zero_grad()
        logits = module(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:])
        loss.backward()
        optimizer.step()
    return loss.item()


start = time.perf_counter()
draw = np.random.default_rng(0)
arguments.folder.mkdir(parents=True, exist_ok=True)

# The private part.
records = [record for number in range(arguments.patients) for record in notes_of(draw, number)]
with open(arguments.folder / "notes.jsonl", "w") as file:
    file.writelines(json.dumps(record) + "\n" for record in records)
print(f"{arguments.folder / 'notes.jsonl'}: {arguments.patients:,} patients, {len(records):,} notes")

# The public part: textbook, tokenizer, model.
every_fourth = [*TEXTBOOK, *TEXTBOOK, *TEXTBOOK, *NOTES[:6]]  # a sentence as in a note, about nobody
textbook = [" ".join(sentence(draw, every_fourth, "The patient") for _ in range(8)) for _ in range(2_000)]
tokenizer = train_tokenizer(textbook)
torch.manual_seed(0)
end = tokenizer.get_vocab()["<|endoftext|>"]
config = GPT2Config(
    n_layer=2, n_embd=64, n_head=4, vocab_size=len(tokenizer), n_positions=CONTEXT, bos_token_id=end, eos_token_id=end
)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
module = GPT2LMHeadModel(config)
tokens = torch.tensor([token for text in textbook for token in [*tokenizer(text)["input_ids"], end]])
loss = train_in_public(module, tokens, draw)
module.save_pretrained(arguments.folder / "model")
tokenizer.save_pretrained(arguments.folder / "model")
size = sum(leaf.numel() for leaf in module.parameters())
print(f"{arguments.folder / 'model'}: a public model of {size:,} parameters, loss {loss:.2f} on the textbook", end=" ")
print(f"({time.perf_counter() - start:.0f} s)")
