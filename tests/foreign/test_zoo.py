"""A short run of the module zoo: a few kinds of every group, and that the zoo notices what it is made to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo.__main__ import chosen, main, summary
from benchmarks.zoo.draws import floats
from benchmarks.zoo.hold import CHANGED, CRASHED, DIFFERENT, EXACT, MENDED, REFUSED, Case, Kind, digest, hold
from benchmarks.zoo.page import page, publish
from fdp.types import FdpError

pytest.importorskip("transformers")

KINDS = {kind.name: kind for _, kind in chosen()}
SHORT = {
    "BOFT": MENDED,
    "Linear on tokens": EXACT,
    "Embedding with sparse gradients": EXACT,
    "Embedding with max_norm": MENDED,
    "Conv2d, strided groups": EXACT,
    "BatchNorm2d in train()": MENDED,
    "ReLU in place": EXACT,
    "Dropout in train()": EXACT,
    "a pruned Linear": EXACT,
    "tied words": EXACT,
    "constants as attributes": EXACT,
    "a frozen parameter, averaged": MENDED,
    "a frozen parameter, .data =": MENDED,
    "a table that grows": EXACT,
    "a memory": MENDED,
    "a random number that nobody uses": EXACT,
    "sorted by length": MENDED,
    "a mean over the batch": MENDED,
    "layers that own all parameters": EXACT,
    "no parameters": MENDED,
    "DataParallel": MENDED,
}


def test_there_are_at_least_150_kinds_of_which_a_third_is_compiled():
    every = [kind for _, kind in chosen()]
    assert len(every) >= 150
    assert len({kind.name for kind in every}) == len(every)
    assert 3 * sum(kind.compiled for kind in every) >= len(every)


LONG = {"BOFT"}  # a sample of one token has a gradient of zero but for rounding; peft warns of a kernel it cannot build
MARKS = (pytest.mark.slow, pytest.mark.filterwarnings("ignore"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS) if name in LONG else name for name in SHORT])
def test_kinds_are_exact_or_exact_by_the_remedy(name):
    row = hold(KINDS[name], compiled=False)
    assert row.verdict == SHORT[name], row.words


@pytest.mark.parametrize("name", ["Linear"])
def test_kinds_are_exact_if_compiled(name):
    row = hold(KINDS[name], compiled=True)
    assert row.compiled == EXACT, row.words


class Scaled(nn.Module):
    """A layer about which the zoo can be given false claims."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.seen = nn.Linear(6, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x).tanh()


def lying(take: Callable[..., Any]) -> Kind:
    return Kind("lying", lambda: Case(Scaled().double(), floats("x", 5, 6), take=take))


def honest(module: nn.Module, example: Any) -> Any:
    return Case(module, floats("x", 5, 6)).model(example)


def doubled(module: nn.Module, example: Any) -> Any:
    model, params = honest(module, example)
    first = model.blocks[0]
    return model._replace(blocks=(first._replace(apply=lambda *args: 2 * first.apply(*args)),)), params


def counting(module: Any, example: Any) -> Any:
    module.seen += 1
    return honest(module, example)


def writing(module: Any, example: Any) -> Any:
    made = honest(module, example)
    module.l.weight.data[0, 0] += 1e-12
    return made


def failing(module: Any, example: Any) -> Any:
    raise KeyError("nothing that fdp says")


def refusing(module: Any, example: Any) -> Any:
    raise FdpError("no")


@pytest.mark.parametrize(
    ("take", "verdict"),
    [
        (honest, EXACT),
        (doubled, DIFFERENT),
        (counting, CHANGED),
        (writing, CHANGED),
        (failing, CRASHED),
        (refusing, CRASHED),
    ],
)
def test_the_zoo_notices_differences_changes_and_crashes(take, verdict):
    row = hold(lying(take), compiled=False)
    assert row.verdict == verdict, row.words
    assert row.good == (verdict == EXACT)


def test_a_kind_that_must_be_refused_and_is_not_is_a_difference():
    row = hold(lying(honest)._replace(refusal="not independent"))
    assert row.verdict == DIFFERENT
    assert hold(lying(refusing)._replace(refusal="no")).verdict == REFUSED
    assert hold(lying(refusing)._replace(refusal="yes")).verdict == CRASHED
    assert hold(lying(refusing)._replace(mend=lambda case: case._replace(take=honest))).verdict == MENDED


def test_a_digest_covers_everything_that_can_be_reached():
    module: Any = Scaled()
    before = digest(module)
    module.l.weight.data[0, 0] = -module.l.weight.data[0, 0]
    assert digest(module) != before
    module.l.weight.data[0, 0] = -module.l.weight.data[0, 0]
    assert digest(module) == before
    module.l.weight.grad = torch.zeros(4, 6)
    assert digest(module) != before


def test_the_command_prints_every_kind_and_writes_the_page(tmp_path, capsys):
    assert main(["--only", "L*Norm", "--compile", "none", "--publish", str(tmp_path)]) == 0
    assert "LayerNorm" in capsys.readouterr().out
    (written,) = tmp_path.glob("*.md")
    assert "| LayerNorm | exact | - |" in written.read_text()
    again = publish([hold(KINDS["Linear"], group="torch.nn", compiled=False)], tmp_path, backend="none")
    assert "| Linear | exact | - |" in again.read_text()
    assert "| LayerNorm | exact | - |" in again.read_text()
    assert page.__doc__
    assert summary([]) == "0 kinds: ; 0 of them compiled, too"
