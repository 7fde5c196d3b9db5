"""Mistakes that users make: each command as typed, and the remedy that its message must name.

Every command runs in a folder with the files of :func:`desk`. It must end with exit code 2 and one paragraph on stderr,
write nothing, and show no value of the private records.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.cli.train_runs import call, train

transformers = pytest.importorskip("transformers")


class Mistake(NamedTuple):
    """A command as typed after ``fdp``, and a pattern of the remedy in its message."""

    command: str
    remedy: str


COMMANDS = [
    Mistake("trian --epsilon 3", "Did you mean 'train'"),
    Mistake("inspect", "try fdp inspect gpt-nano"),
    Mistake("inspect nowhere", "hf download"),
    Mistake("search --lr 1e-2", "such as --lr 2e-3,4e-3, .*use fdp train"),
    Mistake("search --lr fast,slow", "--lr: expected a number, got 'fast'"),
    Mistake("advise --hours 0", "--hours: expected a positive number"),
    Mistake("generate run", "add --prompt"),
    Mistake("generate void --prompt Once", "expected the folder of a finished run"),
    Mistake("generate nowhere --prompt Once", "name the --out of the run"),
    Mistake("generate run --prompt Once", "name the run of a language model"),
    Mistake("generate tiny --prompt Once", "--tokenizer bytes"),
    Mistake("report nowhere", "name the --out of the run"),
    Mistake("report run --out page.txt", "--out page.html"),
    Mistake("report run --out notes.csv", "--out: .* give another"),
    Mistake("statement nowhere", "name the --out of the run"),
    Mistake("statement run --records-per-person 0", "--records-per-person: expected 1 to .*--unit user"),
    Mistake("statement run --out notes.csv", "--out: expected a new file .*give another"),
    Mistake("statement run --format pdf", "^fdp: --format: expected one of text, markdown, json, got 'pdf'$"),
]
NAMES_OF_OTHER_TOOLS = [
    Mistake("train --max-grad-norm 1", "fdp calls it --max-norm"),
    Mistake("train --fp16", "use --dtype bfloat16"),
    Mistake("train --dtype float16", "--dtype: .*Use bfloat16"),
    Mistake("train --gradient-accumulation-steps 4", "--batch-size .*--microbatch"),
    Mistake("train --per-device-train-batch-size 8", "fdp calls it --microbatch"),
    Mistake("train --clip 1.0", "--max-norm 1.0"),
]
MODELS = [
    Mistake("train --model meta-llama/Llama-3.2-1B", "--model: .*hf download meta-llama/Llama-3.2-1B --local-dir"),
    Mistake("train --model gpt-nan", "--model: .*Did you mean 'gpt-nano'"),
    Mistake("train --model tiny --data notes.jsonl", "--tokenizer bytes if the model reads bytes"),
    Mistake("train --model tiny --data notes.jsonl --tokenizer gpt2", "--tokenizer: .*save_pretrained"),
    Mistake("train --model tiny --data notes.jsonl --tokenizer bytes --context 4096", "give --context 16 or less"),
    Mistake("train --lora 4 --lora-targets q_proj", r"--lora-targets: .*there are .*blocks\.\*\.qkv"),
    Mistake("train --lora-targets qkv", "expected --lora .*add that, or leave --lora-targets out"),
    Mistake("train --model logistic --data notes.jsonl", "--model gpt-nano"),
    Mistake("train --model gpt-nano --data digits", "--model mlp"),
]
DATA = [
    Mistake("train --data nowhere.jsonl", "--data: .*Check the path"),
    Mistake("train --data https://example.org/notes.jsonl", "--data: .*nothing is downloaded"),
    Mistake("train --data empty.jsonl", "empty.jsonl: .*check that it is the file you meant"),
    Mistake("train --data empty.txt", "empty.txt: .*check that it is the file you meant"),
    Mistake("train --data void", "void: .*check that it is the one you meant"),
    Mistake("train --data bars.csv", "write the table again with commas"),
    Mistake("train --data splits", "name one: splits/test, splits/train"),
    Mistake("train --data notes.xlsx", r"notes.xlsx: .*write its rows as \.csv"),
    Mistake("train --data broken.jsonl", "broken.jsonl, line 2: .*repair or drop the record"),
    Mistake("train --data latin.txt", "latin.txt: .*UTF-8.* convert the file"),
    Mistake("train --data numbers.jsonl", "line 1: expected text .*--field"),
    Mistake("train --data notes.jsonl --field note", "no such field .*name the field with --field"),
    Mistake("train --data notes.csv --field note", "--field"),
    Mistake("train --data notes.jsonl --form chat", "--form: expected one of auto, text, completion, messages, file"),
    Mistake("train --data notes.jsonl --form messages", "add --unit record"),
    Mistake("train --data notes.jsonl --unit patient", "--unit: expected one of window, record, user, row"),
    Mistake("train --data notes.jsonl --unit user", "For example: --user-field patient_id"),
    Mistake("train --data notes.jsonl --user-field patient_id", "Add --unit user"),
    Mistake("train --data notes.jsonl --unit user --user-field pateint_id", "name the field with --user-field"),
    Mistake("train --data nobody.jsonl --unit user --user-field patient_id", "line 10: .*drop records without a known"),
    Mistake("train --data notes.jsonl --long split", "--long: expected --unit record or user .*leave --long out"),
    Mistake("train --data notes.jsonl --pack", "--pack: expected --unit user .*leave --pack out"),
    Mistake("train --data notes.jsonl --public-data notes.jsonl", "--public-data .*leave one of them out"),
    Mistake("train --data notes.jsonl --eval-data notes.jsonl", "--eval-fraction 0.1"),
]
SETTINGS = [
    Mistake("train --config misspelt.toml", "misspelt.toml: .*did you mean 'epsilon'"),
    Mistake("train --config section.toml", r"expected epsilon in the section \[privacy\]"),
    Mistake("train --config type.toml", "type.toml, steps: .*expected a whole number"),
    Mistake("train --config unclosed.toml", "unclosed.toml: .*line 1"),
    Mistake("train --config nowhere.toml", "--show-config prints one"),
    Mistake("train --schedule poly", "--schedule: expected one of constant, cosine, linear"),
    Mistake("train --optimizer adamx", "--optimizer: .*Did you mean 'adam"),
    Mistake("train --steps 10 --epochs 3", "either --steps or --epochs, got both; leave one out"),
    Mistake("train --steps 0", "--steps: expected a whole number of at least 1"),
    Mistake("train --steps=1.5", "--steps: expected a whole number, got '1.5'"),
    Mistake("train --lr -1", "--lr: expected a finite number of 0 or more"),
    Mistake("train --lr fast", "--lr: expected a number, got 'fast'"),
    Mistake("train --mesh shard=2", "--mesh: .*add --nproc 2"),
    Mistake("train --save-every 10", "--save-every: .*add --out"),
    Mistake("train --keep 4", "--keep: expected --save-every"),
    Mistake(
        "train --model logistic --data digits --out run", "--out: run already holds a run .*give another directory"
    ),
    Mistake("train --model logistic --data digits --wandb", "--wandb: expected --wandb-online, .*WANDB_MODE=offline"),
    Mistake("train --wandb-online", "--wandb-online: expected --wandb "),
]
PRIVACY = [
    Mistake("train --epsilon 0", "--epsilon: expected a finite number above 0"),
    Mistake("train --delta 1.5", "--delta: expected a number between 0 and 1"),
    Mistake("train --epsilon 3 --noise-multiplier 1", "either --epsilon or --noise-multiplier, .*leave one out"),
    Mistake("train --method none --epsilon 3", "leave --epsilon out, or leave --method out"),
    Mistake("train --method none --delta 1e-5", "--delta: expected a --method other than none"),
    Mistake(
        "train --data notes.jsonl",
        r"--batch-size: .*population 20, which .*, got 32, the default. Lower it, .*-size 5,",
    ),
    Mistake("train --data notes.jsonl --batch-size 5000", "--batch-size: .*population .*Lower it"),
    Mistake("train --extend run --epsilon 0.1", "--epsilon: expected more than .*raise it"),
    Mistake("train --extend nowhere", "--extend nowhere: .*name the --out of the run"),
    Mistake("train --extend run --model mlp", "--extend run: .*leave it out"),
]
EVALUATION = [
    Mistake("train --eval-fraction 1.5", "--eval-fraction: .*such as 0.1"),
    Mistake("train --eval-fraction 0.1 --eval-data notes.jsonl", "--eval-data and --eval-fraction: .*leave one out"),
    Mistake(
        "train --eval-data notes.jsonl --eval-public --eval-epsilon 1", "public data needs no noise: leave one out"
    ),
    Mistake("train --eval-epsilon 1", "expected --eval-data or --eval-fraction"),
    Mistake("train --keep-best", "expected --eval-data or --eval-fraction .*leave --keep-best out"),
    Mistake("train --ema 1", "--ema: .*below 1, such as 0.99"),
    Mistake("train --model logistic --data digits --noise-multiplier 1 --sample Once", "leave --sample out"),
]
MISTAKES = [*COMMANDS, *NAMES_OF_OTHER_TOOLS, *MODELS, *DATA, *SETTINGS, *PRIVACY, *EVALUATION]

PRIVATE = ("zoltan", "oncology", "carcinoma", "relapse", "7719")
"""Words that are only in the values of the private records."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with notes in good and bad files, settings, a model without a tokenizer, and a finished run."""
    desk = tmp_path_factory.mktemp("desk")
    notes = [
        {"patient_id": f"zoltan{i % 12}", "ward": f"oncology{i % 3}", "text": f"carcinoma {i} seen; relapse at night"}
        for i in range(40)
    ]
    nameless = {key: value for key, value in notes[9].items() if key != "patient_id"}
    texts = {
        "notes.jsonl": as_lines(notes),
        "nobody.jsonl": as_lines([*notes[:9], nameless, *notes[10:]]),
        "numbers.jsonl": as_lines(note | {"text": 7719} for note in notes),
        "broken.jsonl": as_lines(notes[:1]) + "{'patient_id': 'zoltan1'\n",
        "empty.jsonl": "",
        "empty.txt": "",
        "notes.csv": as_table(notes, ","),
        "bars.csv": as_table(notes, "|"),
        "misspelt.toml": "[privacy]\nepsilom = 3.0\n",
        "section.toml": "[training]\nepsilon = 3.0\n",
        "type.toml": '[training]\nsteps = "many"\n',
        "unclosed.toml": "[training\nsteps = 3\n",
        "splits/dataset_dict.json": '{"splits": ["train", "test"]}',
        "splits/train/state.json": "{}",
        "splits/test/state.json": "{}",
    }
    for name, text in texts.items():
        (desk / name).parent.mkdir(parents=True, exist_ok=True)
        (desk / name).write_text(text)
    (desk / "notes.xlsx").write_bytes(b"PK\x03\x04 zoltan1")
    (desk / "latin.txt").write_bytes("carcinoma, été".encode("latin-1"))
    (desk / "void").mkdir()
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(desk / "tiny")
    assert train(desk / "run", "--ledger", "off", "--quiet") == 0
    return desk


def as_lines(records: Iterable[dict[str, Any]]) -> str:
    """Return records as JSON lines."""
    return "".join(f"{json.dumps(record)}\n" for record in records)


def as_table(records: list[dict[str, str]], separator: str) -> str:
    """Return records as a table with a header, every value in quotes."""
    rows = [list(records[0]), *(map(json.dumps, record.values()) for record in records)]
    return "".join(separator.join(row) + "\n" for row in rows)


def files_in(folder: Path) -> dict[Path, int | None]:
    """Return everything below a folder, and when each file was written."""
    return {path: path.stat().st_mtime_ns if path.is_file() else None for path in folder.rglob("*")}


def test_there_are_many_mistakes() -> None:
    assert len({mistake.command for mistake in MISTAKES}) == len(MISTAKES) >= 40


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.command)
def test_a_mistake_is_answered_with_its_remedy(mistake, desk, monkeypatch, capfd):
    monkeypatch.chdir(desk)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    before = files_in(desk)
    code = call(*shlex.split(mistake.command))
    shown, explained = capfd.readouterr()
    assert code == 2, explained
    assert explained.startswith("fdp: "), explained
    assert explained.count("\n") == 1, "one paragraph"
    assert re.search(mistake.remedy, explained), explained
    assert shown == "", "nothing else is printed"
    assert not [word for word in PRIVATE if word in explained], "values of the records are not shown"
    assert files_in(desk) == before, "nothing is written"


def test_a_run_that_diverges_names_the_learning_rate(tmp_path, capfd):
    assert train(tmp_path / "run", "--lr", "1e6", "--quiet", steps=30) == 4
    shown, explained = capfd.readouterr()
    assert shown == ""
    assert re.fullmatch(r"fdp: diverged: .*Lower --lr, to a tenth or less, .*\n", explained), explained
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_settings_that_waste_the_budget_get_a_hint(desk, monkeypatch, capfd):
    monkeypatch.chdir(desk)
    before = files_in(desk)
    assert call(*shlex.split("train --model logistic --data digits --steps 3 --dry-run")) == 0
    shown, explained = capfd.readouterr()
    assert re.search(
        r"hint: the first step spends .*4 times as many steps, --steps \d+, need only [\d.]+ times the noise",
        " ".join(shown.split()),
    )
    assert explained == ""
    assert files_in(desk) == before


def test_a_linear_schedule_is_no_mistake(desk, monkeypatch):
    monkeypatch.chdir(desk)
    assert (
        call(*shlex.split("train --model logistic --data digits --noise-multiplier 1 --schedule linear --dry-run")) == 0
    )
