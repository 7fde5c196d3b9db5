"""A module, a loss and samples as people have them, as a model, its first parameters and a dataset of fdp.

    data = {"batch": what the samples are, "dropout": a key per sample, if a part of the module is in train() mode}

A module of ``transformers`` without a loss of its own is computed block by block (``fdp.run.labelled_batches``), and
without dropout. Any other module is one block, and its loss is checked to be one number per sample.

    >>> subject = make_subject(module, samples, loss=nn.CrossEntropyLoss())
    >>> subject.model, subject.values, subject.dataset
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fdp import keys, tree
from fdp.data.units import dataset_unit
from fdp.fingerprint import fingerprint
from fdp.foreign.hub import hugging_face
from fdp.foreign.leaves import object_settings, params_of
from fdp.foreign.module import from_module
from fdp.foreign.stack.block_functions import Caller
from fdp.foreign.uses.dropout import DROPOUT_KEYS
from fdp.model import Model
from fdp.parallel.dtensors import shard_leaf
from fdp.parallel.sharding import Sharding
from fdp.privacy.microbatches import Dataset
from fdp.run.collated_samples import CollatedSamples
from fdp.run.labelled_batches import LabelledBatches, is_transformers, labelled_batches
from fdp.run.own_samples import spread_indices
from fdp.run.sample_losses import Loss, sample_losses, takes_module
from fdp.types import FdpError, Key, Tree

EXAMPLE_SAMPLES = 4
"""Samples on which a module is checked."""
TARGETS = ("label", "labels", "target", "targets", "y")
"""Entries of a dictionary that hold the target of a loss."""
PADDING_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Difference of a loss with and without padding that rounding explains; in half precision, 0.05."""
LENGTHS_COMPARED = 64
"""Samples among which the shortest are looked for, to compare them with and without padding."""


class Scores(NamedTuple):
    """The loss of every sample of a batch and, for classifiers, which of them were classified correctly."""

    losses: Tensor
    correct: Tensor | None


class Subject(NamedTuple):
    """A model, its first parameters, and its data in the form that the model takes.

    ``measure(module, batch)`` returns the :class:`Scores` of the module itself, for evaluation; None without a module.
    """

    model: Model
    values: Callable[[Model, Sharding | None, Key], Tree]
    dataset: Dataset
    measure: Callable[[nn.Module, Tree], Scores] | None


@dataclass(frozen=True)
class ConvertedSamples:
    """Samples in the form that a model takes; with ``keys``, every sample has a dropout key, its index.

    The run folds the step into the keys, so that a sample's dropout depends on the sample and the step alone.
    """

    source: Dataset
    convert: Callable[[Tree], Tree]
    keys: bool

    @property
    def unit(self) -> Any:
        """The unit of privacy that the source states, if any."""
        return dataset_unit(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, indices: np.ndarray) -> Tree:
        data = self.convert(self.source.fetch(indices))
        if not self.keys:
            return data
        keys = torch.zeros(len(indices), 8, dtype=torch.int64)
        keys[:, 0] = torch.from_numpy(np.asarray(indices))
        return data | {DROPOUT_KEYS: keys.to(tree.leaves(data)[0].device)}


def make_subject(
    module: nn.Module, samples: Dataset, *, loss: Loss | None, materialize: tuple[str, ...] = ()
) -> Subject:
    """Return the model of a module with its loss. The module may change its mode and its parameters afterwards."""
    own = _private_copy(module)
    if loss is None and is_transformers(own):
        own.eval()  # no dropout, as with fdp train: it would be one block, and noise regularises already
    device = next((leaf.device for leaf in own.parameters()), torch.device("cpu"))
    first = _on(samples.fetch(spread_indices(len(samples), EXAMPLE_SAMPLES)), device)
    labelled = labelled_batches(own, first) if loss is None else None
    convert = _wrapped if labelled is None else labelled.convert
    dataset = ConvertedSamples(samples, convert, keys=any(part.training for part in own.modules()))
    example = _on(dataset.fetch(spread_indices(len(samples), EXAMPLE_SAMPLES)), device)
    settings = {"example": example, "materialize": materialize}
    calls = _calls(own, first, loss) if labelled is None else Calls(labelled.call, labelled.losses, _labels)
    model = _make_model(own, calls, labelled, **settings)
    if isinstance(samples, CollatedSamples) and samples.longest:
        quiet = own if not dataset.keys else _private_copy(own).eval()  # dropout would differ with the length
        same = model if quiet is own else _make_model(quiet, calls, labelled, **settings, check=False)
        _check_padding(same, params_of(quiet, same), samples, convert, device)
    model = model._replace(settings=fingerprint(model.settings, loss, object_settings(loss)))
    return Subject(model, module_values(tree.flatten(params_of(own, model))), dataset, _measure(calls, labelled))


class Calls(NamedTuple):
    """The function that calls a module with a batch, the losses of its outputs, and the targets in the batch."""

    call: Caller
    losses: Callable[[Any, Tree], Tensor] | None
    targets: Callable[[Tree], Tensor | None]


def _make_model(
    module: nn.Module,
    calls: Calls,
    labelled: LabelledBatches | None,
    *,
    example: Tree,
    materialize: tuple[str, ...],
    check: bool = True,
) -> Model:
    """Return the model of the module: block by block if its class is known, else as one block."""
    if labelled is not None and labelled.blocks:
        return hugging_face.model_of(module, example=example)
    given = {"example": example, "materialize": materialize, "check": check}
    return from_module(module, loss=calls.losses, call=calls.call, **given)[0]


def _measure(calls: Calls, labelled: LabelledBatches | None) -> Callable[[nn.Module, Tree], Scores]:
    def measure(module: nn.Module, batch: Tree) -> Scores:
        data = _wrapped(batch) if labelled is None else labelled.with_labels(batch)
        outputs = calls.call(module, {"batch": _float_as(data["batch"], module)})
        losses = outputs if calls.losses is None else calls.losses(outputs, data)
        scores, targets = _scores(outputs), calls.targets(data["batch"])
        if not isinstance(scores, Tensor) or scores.ndim != 2 or targets is None or targets.shape != scores.shape[:1]:
            return Scores(losses, None)
        return Scores(losses, None if targets.is_floating_point() else scores.argmax(1) == targets)

    return measure


def module_values(leaves: Mapping[str, Tensor]) -> Callable[[Model, Sharding | None, Key], Tree]:
    """Return a function that returns a copy of ``leaves``, in float32 or better, full or as this rank's shards."""
    kept = {path: leaf.detach().clone() for path, leaf in leaves.items()}

    def values(model: Model, sharding: Sharding | None, key: Key) -> Tree:
        wide = {
            path: leaf.to(key.device, torch.promote_types(leaf.dtype, torch.float32)) for path, leaf in kept.items()
        }
        if sharding is None:
            return tree.nest({path: leaf.clone() for path, leaf in wide.items()})
        return tree.nest({path: shard_leaf(leaf, path, sharding) for path, leaf in wide.items()})

    return values


def _private_copy(module: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters, so that a change of mode during the run does not matter."""
    return copy.deepcopy(module, {id(leaf): leaf for leaf in module.parameters()})


def _wrapped(batch: Tree) -> Tree:
    return {"batch": batch}


def _on(data: Tree, device: torch.device) -> Tree:
    return tree.map(lambda leaf: leaf.to(device), data)


def _labels(batch: Tree) -> Tensor:
    return batch["labels"]


def _no_targets(batch: Tree) -> None:
    return None


def _calls(module: nn.Module, batch: Tree, loss: Loss | None) -> Calls:
    """Return how the module is called with a batch, and how losses follow from its outputs."""
    if loss is None:
        inputs = _split_batch(module, batch, targets=False)
        _check_takes(module, inputs(batch)[0])
        return Calls(lambda module, data: _call(module, inputs(data["batch"])[0]), None, _no_targets)
    if takes_module(loss):
        return Calls(lambda module, data: loss(module, data["batch"]), None, _no_targets)
    split = _split_batch(module, batch, targets=True)
    with torch.no_grad():
        outputs = _scores(_call(_plain_call(module), split(_float_as(batch, module))[0]))
    by_sample = sample_losses(loss, outputs, split(batch)[1])

    def call(module: Callable[..., Any], data: Tree) -> Any:
        return _call(module, split(data["batch"])[0])

    def losses(outputs: Any, data: Tree) -> Tensor:
        return by_sample(_scores(outputs), split(data["batch"])[1])

    return Calls(call, losses, lambda batch: split(batch)[1])


def _check_takes(module: nn.Module, inputs: Any) -> None:
    """Refuse samples that a module without a loss cannot be called with."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise FdpError(
            f"loss: expected one, or a module that takes all of a sample and returns its loss, got no loss, and "
            f"{type(module).__name__}.forward does not take a sample: {error}. Give loss=nn.CrossEntropyLoss(), or "
            f"another loss(outputs, targets)"
        ) from error


def _plain_call(module: nn.Module) -> nn.Module:
    """Return the module in eval() mode, for outputs without dropout; the original keeps its mode."""
    return _private_copy(module).eval()


def _float_as(batch: Tree, module: nn.Module) -> Tree:
    dtype = next(module.parameters()).dtype
    return tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)


def _call(module: Callable[..., Any], inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def _scores(outputs: Any) -> Any:
    """Return the scores of a module of transformers, and the outputs of any other as they are."""
    return outputs if isinstance(outputs, (Tensor, tuple, list)) else getattr(outputs, "logits", outputs)


def _split_batch(module: nn.Module, batch: Tree, *, targets: bool) -> Callable[[Tree], tuple[Any, Any]]:
    """Return the function that splits a batch into the inputs of the module and the targets of the loss."""
    if isinstance(batch, Mapping):
        return _split_entries(module, batch, targets=targets)
    if isinstance(batch, Tensor):
        if targets:
            raise FdpError(
                "dataset: expected samples (input, target) for loss(outputs, targets), got tensors alone: the labels "
                "are missing. Give them beside the inputs, or a loss of the module itself: "
                "loss=lambda module, batch: ..."
            )
        return lambda batch: ((batch,), None)
    if len(batch) < 2 and targets:
        raise FdpError(
            f"dataset: expected samples (input, target), got tuples of {len(batch)}: the labels are missing. Give them "
            f"last in every sample, or a loss of the module itself: loss=lambda module, batch: ..."
        )
    return (lambda batch: (batch[:-1], batch[-1])) if targets else (lambda batch: (batch, None))


def _split_entries(module: nn.Module, batch: Mapping[str, Any], *, targets: bool) -> Callable[[Tree], tuple[Any, Any]]:
    named = next((name for name in TARGETS if name in batch), None)
    if targets and named is None:
        raise FdpError(
            f"dataset: expected an entry with the targets of the loss, one of {', '.join(TARGETS)}, got "
            f"{sorted(batch)}; rename it, or give loss=lambda module, batch: ..."
        )
    arguments = inspect.signature(module.forward).parameters
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    wanted = [name for name in batch if (name in arguments or takes_all) and not (targets and name == named)]
    others = [name for name in batch if name != named]
    if not wanted and len(others) == 1:  # one input: its name does not matter
        return lambda batch: ((batch[others[0]],), batch[named] if targets else None)
    if not wanted:
        raise FdpError(
            f"dataset: expected entries that the module's forward takes, {list(arguments)}, got {sorted(batch)}; "
            f"rename them, or give loss=lambda module, batch: ..."
        )
    return lambda batch: ({name: batch[name] for name in wanted}, batch[named] if targets else None)


def _check_padding(
    model: Model, params: Tree, samples: CollatedSamples, convert: Callable[[Tree], Tree], device: torch.device
) -> None:
    """Refuse padding that changes a sample's loss: how far a sample is padded depends on the longest of the others."""
    several = spread_indices(len(samples), min(LENGTHS_COMPARED, len(samples))).tolist()
    shortest_first = sorted(several, key=lambda i: _elements(samples.fetch_alone(i)))
    for index in shortest_first[:EXAMPLE_SAMPLES]:
        sample = samples.source[index]  # read once: it may be drawn at random
        batches = [convert(batch) for batch in (samples.row(sample), samples.row_alone(sample))]
        for values in (params, _perturbed(params)):
            with torch.no_grad():
                padded, alone = (model.loss(values, _on(batch, device)) for batch in batches)
            tolerance = PADDING_TOLERANCE.get(tree.leaves(params)[0].dtype, 0.05)
            if bool(torch.isfinite(alone)) and not torch.allclose(padded, alone, rtol=tolerance, atol=tolerance):
                raise FdpError(
                    "collate_fn: expected padding that does not change the loss of a sample, got another loss for a "
                    "sample without padding: the loss of one sample would depend on the length of others. Leave "
                    "padding out of the loss (labels of -100) and of attention (an attention mask), pad on the right, "
                    "or cut all samples to one public length"
                )


def _perturbed(params: Tree) -> Tree:
    """Return other parameters, large enough that tokens influence each other as they may after training."""
    flat = tree.flatten(params)
    noise = {path: keys.normal(keys.fold_in(keys.key(0), path), leaf.shape).to(leaf) for path, leaf in flat.items()}
    return tree.nest({path: leaf + 0.5 * noise[path] for path, leaf in flat.items()})


def _elements(batch: Tree) -> int:
    return sum(leaf.numel() for leaf in tree.leaves(batch))
