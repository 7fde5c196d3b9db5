"""A short tour, printed by ``fdp`` alone."""

from __future__ import annotations

TOUR = """\
fdp trains and fine-tunes language models with differential privacy: what one person adds to the data has little
influence on the model, and the budget (epsilon, delta) says how little.

  fdp train                                    a first run: a small GPT on Python's own sources, in a minute or two
  fdp train --model models/gpt2 --data notes.jsonl --unit user --user-field author --lora 16 --epsilon 3
                                               fine-tune a folder of transformers, each author protected as a whole
  fdp train --show-config > run.toml           every setting, to edit and to use with fdp train --config run.toml
  fdp epsilon --epsilon 3 --population 60000 --batch-size 256 --epochs 3 --delta 1e-7
                                               the noise for a budget, without training
  fdp inspect models/gpt2                      what fdp sees in a model: leaves, rules, memory

fdp --help lists all commands, fdp train --help all options; fdp --install-completion completes them in your shell.
Read on: docs/command_line.md, docs/data.md (what one sample is), docs/guarantees.md (what is promised and what not)."""
