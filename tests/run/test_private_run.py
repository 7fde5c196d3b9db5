"""``fdp.private``: a module, samples and a loss as people have them; the same guarantee as the functions below it."""

from __future__ import annotations

import copy
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fdp
import fdp.run.private_run
from fdp import models, optimizers
from fdp.data.datasets import digits
from fdp.fast.out_of_memory import OutOfMemory
from fdp.privacy.guarantee import MARKER, read_marker
from fdp.run.private_run import PrivateRun
from fdp.run.training_run import draw_batch
from fdp.types import FdpError
from tests.ranks import run_on_ranks


def data(samples: int = 60, features: int = 6) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def net(features: int = 6, *between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), *between, nn.Linear(5, 2))


def make(module: Any = None, dataset: Any = None, **changes: Any) -> PrivateRun:
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "steps": 3, "batch_size": 10, "seed": 0}
    if isinstance(module or nn.Module(), nn.Module):
        settings["loss"] = nn.CrossEntropyLoss()
    settings |= changes
    return fdp.private(net() if module is None else module, data() if dataset is None else dataset, **settings)


def same(one: PrivateRun, other: PrivateRun) -> bool:
    return all(torch.equal(value, other.params()[path]) for path, value in one.params().items())


# The run


def test_a_run_reaches_its_epsilon_and_learns():
    x, y = data(1000)
    run = make(
        dataset=(x, y), noise_multiplier=None, epsilon=3, delta=1e-6, epochs=3, steps=None, batch_size=100, lr=0.02
    )
    before = run.evaluate((x, y))
    run.fit()
    assert 2.9 < run.epsilon <= 3
    assert run.epsilon == pytest.approx(fdp.spent(run.state, run.run.mechanism, delta=1e-6))
    after = run.evaluate((x, y))
    assert after.accuracy is not None
    assert after.accuracy > 0.8
    assert (after.loss or 9) < (before.loss or 0)
    assert len(run.history) == len(run) == 30


def test_metrics_are_means_over_the_samples_that_were_drawn():
    run = make(microbatch=16)
    loss = nn.CrossEntropyLoss(reduction="none")
    first = copy.deepcopy(run.module)
    metrics = next(iter(run))
    batch = draw_batch(run.run, 0)
    drawn = batch.mask > 0
    assert metrics.samples == int(drawn.sum())
    inputs, targets = (leaf[drawn] for leaf in batch.data["batch"])
    assert first is not None
    assert metrics.loss == pytest.approx(float(loss(first(inputs), targets).mean().detach()), rel=1e-5)
    assert metrics.step == 1
    assert metrics.epsilon == pytest.approx(run.epsilon)


def test_the_step_is_the_clipped_sum_of_the_samples_gradients():
    """With every sample drawn and little noise, SGD moves by the sum of clipped gradients over the batch size."""
    run = make(noise_multiplier=0.1, optimizer="sgd", lr=1.0, steps=1, max_norm=0.1, batch_size=60)
    assert run.module is not None
    own = copy.deepcopy(run.module)
    expected = {name: torch.zeros_like(leaf) for name, leaf in own.named_parameters()}
    for x, y in zip(*data()):
        gradients = torch.autograd.grad(F.cross_entropy(own(x[None]), y[None]), list(own.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for name, gradient in zip(expected, gradients):
            expected[name] -= gradient * min(1.0, 0.1 / float(norm)) / 60
    run.fit()
    before, after = dict(own.named_parameters()), run.params()
    moved = torch.cat([(after[name] - before[name].detach()).flatten() for name in expected])
    wanted = torch.cat([value.flatten() for value in expected.values()])
    assert float((moved - wanted).norm() / wanted.norm()) < 0.1


def test_a_second_loop_continues_and_the_same_seed_repeats():
    whole, parts = make().fit(), make()
    for _ in parts:
        break
    assert len(parts.history) == 1
    assert [metrics.step for metrics in parts] == [2, 3]
    assert same(whole, parts)
    assert not same(whole, make(seed=1).fit())


def test_runs_that_differ_in_the_loss_alone_share_no_noise():
    keys = [
        make(loss=loss).run.key.tolist()
        for loss in (
            nn.CrossEntropyLoss(),
            nn.CrossEntropyLoss(label_smoothing=0.1),
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
            F.cross_entropy,
            partial(F.cross_entropy, label_smoothing=0.1),
        )
    ]
    assert len({tuple(key) for key in keys}) == 5
    assert make().run.key.tolist() == keys[0]


def test_first_parameters_are_part_of_the_key():
    other = net()
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert make(other).run.key.tolist() != make().run.key.tolist()


def test_callbacks_see_every_step_and_may_end_the_run():
    seen: list[int] = []

    def callback(run: PrivateRun, metrics: Any) -> bool:
        seen.append(metrics.step)
        return metrics.step < 2

    run = make().fit(callback=callback)
    assert seen == [1, 2]
    assert int(run.state.step) == 2
    assert run.epsilon < (run.guarantee.epsilon or 0)


def test_evaluation_on_data_and_by_a_function():
    run = make().fit(evaluate=data(), evaluate_every=2)
    assert [step for step, _ in run.evaluations] == [2, 3]
    evaluation = run.history[-1].evaluation
    assert evaluation is not None
    assert evaluation.cost == "outside"
    seen: list[nn.Module] = []
    run = make().fit(evaluate=seen.append, evaluate_every=3)
    assert seen == [run.module]


def test_the_repr_states_the_guarantee():
    run = make(noise_multiplier=None, epsilon=3)
    assert "epsilon 3.000 at delta 1e-06 for one sample, added or removed; 0 of 3 steps made" in repr(run).replace(
        "2.999", "3.000"
    )


# Modules


def test_the_module_is_untouched_until_it_is_written_back():
    module = net()
    before = copy.deepcopy(module.state_dict())
    run = make(module)
    for _ in run:
        module.eval()  # its mode is its own
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    trained = run.state_dict()
    assert run.write_back() is module
    assert all(torch.equal(value, trained[name]) for name, value in module.state_dict().items())
    assert not torch.equal(module.state_dict()["0.weight"], before["0.weight"])


def test_frozen_tied_and_buffers():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.frozen(self.embed(tokens)).mean(1) * self.scale)

    module = Tied().bfloat16()
    before = copy.deepcopy(module.state_dict())
    tokens = torch.randint(7, (40, 3), generator=torch.Generator().manual_seed(0))
    run = make(module, (tokens, tokens[:, 0])).fit()
    after = module.state_dict()
    assert torch.equal(after["frozen.weight"], before["frozen.weight"])
    assert torch.equal(after["scale"], before["scale"])
    assert module.head.weight is module.embed.weight
    assert after["embed.weight"].dtype == torch.bfloat16
    assert not torch.equal(after["embed.weight"], before["embed.weight"])
    assert torch.equal(run.state_dict()["head.weight"], run.state_dict()["embed.weight"])


def test_dropout_draws_other_masks_at_every_step():
    run = make(net(6, nn.Dropout(0.5)), steps=2)
    keys = [draw_batch(run.run, t).data["dropout"] for t in (0, 0, 1)]
    assert torch.equal(keys[0], keys[1])
    assert keys[0][0, 0].tolist() != keys[2][0, 0].tolist()
    by_sample = keys[0].flatten(0, 1)[:2]
    assert by_sample[0].tolist() != by_sample[1].tolist()
    assert same(run.fit(), make(net(6, nn.Dropout(0.5)), steps=2).fit())
    still = make(net(6, nn.Dropout(0.5)).eval(), steps=2)
    assert "dropout" not in draw_batch(still.run, 0).data


def test_a_model_of_fdp():
    train, test = digits()
    run = make(models.build("logistic"), train, steps=4, batch_size=200, optimizer=optimizers.sgd(1.0)).fit()
    assert run.module is None
    assert run.evaluate(test).loss is not None


def test_a_loss_of_the_module_and_entries_by_name():
    x, y = data()
    entries = {"input": x, "label": y}
    by_name = make(dataset=entries).fit()
    by_module = make(
        dataset=entries,
        loss=lambda module, batch: F.cross_entropy(module(batch["input"]), batch["label"], reduction="none"),
    )
    losses = [next(iter(make(dataset=entries))).loss, next(iter(by_module)).loss]
    assert by_name.epsilon > 0
    assert losses[0] is not None
    assert losses[1] is not None


# Saving


def test_saved_modules_load_again(tmp_path: Path):
    from safetensors.torch import load_model

    run = make().fit()
    folder = run.save(tmp_path / "trained")
    again = net()
    load_model(again, folder / "model.safetensors")
    assert all(torch.equal(value, run.state_dict()[name]) for name, value in again.state_dict().items())
    (promise,) = read_marker(folder)
    assert promise == run.guarantee
    assert json.loads((folder / MARKER).read_text())["runs"][0]["unit"] == "one sample"
    with pytest.raises(fdp.FdpError, match="expected a new or empty folder"):
        run.save(tmp_path / "trained")


def test_a_run_resumes_from_its_checkpoint(tmp_path: Path):
    whole, first = make(seed=None), make(seed=None)
    for _ in first:
        break
    first.save_checkpoint(tmp_path)
    resumed = make(seed=None).load_checkpoint(tmp_path)
    assert [metrics.step for metrics in resumed] == [2, 3]
    for _ in first:
        pass
    assert same(first, resumed)
    assert not same(whole.fit(), resumed)
    for changes, word in (
        ({"noise_multiplier": 2.0}, "noise_multiplier"),
        ({"dataset": data(61)}, "data"),
        ({"lr": 1.0}, "optimizer"),
        ({"steps": 9}, "steps"),
    ):
        with pytest.raises(fdp.FdpError, match=word):
            make(**changes).load_checkpoint(tmp_path)


def test_memory_that_runs_out_halves_the_microbatch_of_the_first_step(monkeypatch: pytest.MonkeyPatch):
    expected = make().fit()
    run = make()
    size, step = run.config.microbatch_size, run.run.step

    def fails(state: Any, batch: Any, key: Any) -> Any:
        raise torch.OutOfMemoryError("too much")

    run.run = run.run._replace(step=fails)
    run.fit()
    assert run.config.microbatch_size == size // 2
    for path, value in run.params().items():
        torch.testing.assert_close(value, expected.params()[path])
    stubborn = make(microbatch=4)
    stubborn.run = stubborn.run._replace(step=fails)
    with pytest.raises(torch.OutOfMemoryError):
        stubborn.fit()
    assert step is not fails


def test_one_of_several_ranks_does_not_begin_again_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(batch_size=8)

    def fails(state: Any, batch: Any, key: Any) -> Any:
        raise torch.OutOfMemoryError("too much")

    run.run = run.run._replace(step=fails)
    monkeypatch.setattr(fdp.run.private_run, "group_size", lambda group: 2)
    with pytest.raises(torch.OutOfMemoryError):
        run.fit()


def test_memory_that_runs_out_while_a_run_is_prepared_halves_the_microbatch_too(monkeypatch: pytest.MonkeyPatch):
    """On several ranks the check of sizes computes whole microbatches, and cannot leave one out."""
    real, tried = fdp.run.private_run.prepare, []

    def limited(config: Any, **options: Any) -> Any:
        tried.append(config.microbatch_size)
        if config.microbatch_size > 2:
            raise OutOfMemory(config.microbatch_size)
        return real(config, **options)

    monkeypatch.setattr(fdp.run.private_run, "prepare", limited)
    run = make()
    assert run.config.microbatch_size == tried[-1] == 2
    assert tried == sorted(tried, reverse=True)
    with pytest.raises(OutOfMemory, match="4 samples"):
        make(microbatch=4)


# Mistakes


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "batch norm": ({"module": net(6, nn.BatchNorm1d(5))}, r"normalises by statistics of the batch.*nn.GroupNorm"),
    "a loss over the batch": (
        {"loss": lambda outputs, targets: (outputs @ outputs.T).logsumexp(1).mean() - targets.float().mean()},
        r"compares samples with each other.*one number per sample",
    ),
    "both budgets": ({"epsilon": 3.0}, "expected either epsilon or noise_multiplier, got both"),
    "no budget": ({"noise_multiplier": None}, "got neither"),
    "no noise": ({"noise_multiplier": 0.0}, "without noise nothing is private"),
    "both lengths": ({"epochs": 1}, "expected either epochs or steps, got both"),
    "a stream": ({"dataset": Stream()}, r"Poisson sampling.*list\(dataset\)"),
    "no samples": ({"dataset": (torch.zeros(0, 6), torch.zeros(0))}, "empty"),
    "no labels": ({"dataset": torch.zeros(20, 6)}, "labels are missing"),
    "no labels, in tuples": ({"dataset": TensorDataset(torch.zeros(20, 6))}, "labels are missing"),
    "labels of another name": ({"dataset": {"input": torch.zeros(9, 6), "klass": torch.zeros(9)}}, "label, labels"),
    "a batch larger than the data": (
        {"batch_size": 100},
        r"batch_size: expected at most the population .* Leave batch_size out for 15,",
    ),
    "a class": ({"module": nn.Linear, "loss": None}, "not its class"),
    "an unknown optimizer": ({"optimizer": "adan"}, "expected one of adamw"),
    "a torch optimizer with groups": (
        {
            "optimizer": torch.optim.SGD(
                [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.ones(1))]}]
            )
        },
        "one group",
    ),
    "lr beside an optimizer": ({"optimizer": optimizers.sgd(0.1), "lr": 0.1}, "inside the optimizer"),
    "an unknown clipping": ({"clip": "ghost"}, "expected one of flat"),
    "a microbatch in words": ({"microbatch": "big"}, "'auto'"),
    "an unknown compile mode": ({"compile": "max"}, "'block'"),
    "texts": ({"dataset": [("a text", 1)] * 20}, "a tokenizer for text"),
    "several lengths": ({"dataset": [(torch.zeros(n % 3 + 1), 1) for n in range(20)]}, "collate_fn that pads"),
    "a wrapped module": ({"module": nn.DataParallel(net())}, "module.module"),
    "nothing to train": ({"module": net().requires_grad_(False)}, "expected a parameter to train"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_with_a_remedy(name: str):
    changes, words = MISTAKES[name]
    with pytest.raises(fdp.FdpError, match=f"(?s){words}"):
        make(**changes)


def test_a_delta_that_allows_publishing_a_sample_warns():
    with pytest.warns(UserWarning, match="publishing one sample"):
        make(delta=0.1)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def by_tokens_of_the_batch(module: Any, batch: Any) -> Tensor:
    """The mean over all tokens of the batch that count: a sample has less weight beside longer ones."""
    losses = F.cross_entropy(module(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="none")
    return losses.sum(1) * len(losses) / (batch["labels"] != -100).sum()


def by_share_of_the_class(outputs: Tensor, targets: Tensor) -> Tensor:
    share = targets.float().mean().clamp(0.02, 0.98)
    weights = torch.where(targets == 1, 1 / share, 1 / (1 - share))
    return F.cross_entropy(outputs, targets, reduction="none") * weights


def test_a_loss_that_couples_samples_of_a_later_kind_is_refused():
    """The first samples are all alike, as in sorted data; only among others does the coupling show."""
    tokens = torch.randint(1, 11, (256, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[8:, :-1] = -100
    with pytest.raises(FdpError, match="sample"):
        make(Tagger(), {"tokens": tokens, "labels": labels}, loss=by_tokens_of_the_batch, batch_size=64)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(FdpError, match="sample"):
        make(nn.Linear(6, 2), (x, (torch.arange(256) >= 128).long()), loss=by_share_of_the_class, batch_size=64)


@pytest.mark.filterwarnings("ignore::fdp.run.repeated_samples.RepeatsWarning")
def test_a_sample_that_is_drawn_anew_may_be_padded():
    """A mask drawn when a sample is read is another one each time, with padding and without."""

    class Masked(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            tokens = torch.arange(3 + index % 5) % 10 + 1
            return tokens, tokens.masked_fill(torch.rand(tokens.shape) < 0.5, -100)

    def pad(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        tokens, labels = (nn.utils.rnn.pad_sequence(list(side), batch_first=True) for side in zip(*samples))
        lengths = torch.tensor([len(tokens) for tokens, _ in samples])
        padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        return {"tokens": tokens, "labels": labels.masked_fill(padding, -100)}

    def loss(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="none").sum(1)

    assert make(Tagger(), Masked(), collate_fn=pad, loss=loss).fit() is not None


def test_a_loss_that_calls_its_outputs_is_told_how_to_be_given_the_module():
    with pytest.raises(FdpError, match=r"calls 'm' or another argument; .* name its first argument module or model"):
        make(loss=lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none"))


def on_ranks_that_differ(what: str) -> str:
    """Make a run on this rank, and return how it is refused."""
    rank = torch.distributed.get_rank()
    module = net()
    if what == "first parameters":
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    if what == "a frozen leaf" and rank:
        next(module.parameters()).requires_grad_(False)
    changes = {
        "clip norm": {"max_norm": 1.0 + rank},
        "learning rate": {"lr": 0.1 * (rank + 1)},
        "delta": {"delta": 1e-6 / (rank + 1)},
        "dtype": {"dtype": (torch.float32, torch.bfloat16)[rank]},
        "loss": {"loss": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1))[rank]},
    }
    try:
        make(module, mesh={"shard": 2}, microbatch=4, **changes.get(what, {}))
    except FdpError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "first parameters",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("a frozen leaf", "clip norm", "learning rate", "delta", "dtype", "loss")
        ),
    ],
)
def test_ranks_that_differ_are_refused(what: str):
    """Each rank would draw samples and noise of its own, and a sample that two ranks drew would count twice."""
    found = run_on_ranks(on_ranks_that_differ, 2, what)
    assert all(("on rank" in said) == (what != "nothing") for said in found), found


def test_a_data_loader_gives_its_dataset_and_its_batch_size():
    loader = DataLoader(TensorDataset(*data()), batch_size=7, shuffle=True)
    with pytest.warns(UserWarning, match="sampler.*not used"):
        run = make(dataset=loader, batch_size=None)
    assert run.run.mechanism.sampling.expected_batch_size == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(dataset=loader, batch_size=9).run.mechanism.sampling.expected_batch_size == 9


def test_torch_optimizers_are_translated():
    module = net()
    given = partial(torch.optim.SGD, module.parameters(), lr=0.5, momentum=0.9)
    assert same(make(optimizer=given()).fit(), make(optimizer=optimizers.sgd(0.5, momentum=0.9)).fit())


def test_a_module_that_is_trained_twice_in_one_process_promises_both_runs(tmp_path: Path):
    module = nn.Linear(3, 2)
    first = copy.deepcopy(module.state_dict())
    data = (torch.randn(40, 3), torch.randint(0, 2, (40,)))

    def train(out: str) -> fdp.PrivateRun:
        settings = {"noise_multiplier": 1.0, "delta": 1e-6, "steps": 2, "batch_size": 8}
        run = fdp.private(module, data, loss=nn.CrossEntropyLoss(), **settings).fit()
        run.save(tmp_path / out)
        return run

    one, two = train("one"), train("two")
    assert [len(read_marker(tmp_path / name)) for name in ("one", "two")] == [1, 2]
    assert "trained" not in repr(one)
    assert "this model was trained privately before" in repr(two)
    module.load_state_dict(first)  # a new attempt from the first parameters
    assert len(read_marker(train("three").save(tmp_path / "again"))) == 1


def test_a_loss_that_is_missing_is_asked_for():
    with pytest.raises(fdp.FdpError, match=r"Linear\.forward does not take a sample.* Give loss=nn\.CrossEntropyLoss"):
        fdp.private(nn.Linear(3, 2), data(), noise_multiplier=1.0, steps=1, batch_size=8)
