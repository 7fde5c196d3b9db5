"""A trainer with the words of ``transformers``: ``PrivateTrainer(model, TrainingArguments(...), epsilon=3).train()``.

training_words    TrainingArguments as arguments of fdp.private; words without a meaning here are refused
trainer           PrivateTrainer: train, evaluate, save_model, callbacks

>>> from fdp.hf import PrivateTrainer
"""

from fdp.hf.trainer import PrivateTrainer as PrivateTrainer
from fdp.hf.trainer import PrivateTrainOutput as PrivateTrainOutput
