"""No error about the data shows what is in them: file, line and field are named, and no content."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdp import keys
from fdp.cli.main import main
from fdp.data import corpus, datasets, text
from fdp.data.document_packing import PackUnit
from fdp.data.documents import join_documents, records
from fdp.data.files import RecordForm
from fdp.parallel import agree
from fdp.types import FdpError
from tests.data.test_text import make_tokenizer
from tests.data.test_tokenizers import NO_SYSTEM

CANARY = "Xylophon4711"
SAID = [{"role": "user", "content": CANARY}, {"role": "assistant", "content": CANARY}]
USER: dict[str, Any] = {"per_user": corpus.PerUser("by", windows=1, key=keys.key(0))}

# A line of a file, and how it is read.
LINES: dict[str, tuple[str | bytes | dict, dict[str, Any]]] = {
    "no JSON": (f'{{"text": "{CANARY}"', {}),
    "bad escape": (f'{{"text": "{CANARY} \\x"}}', {}),
    "control character": (f'{{"text": "{CANARY} \n"}}', {}),
    "no quotes": (f'{{"text": {CANARY}}}', {}),
    "more after it": (f'{{"text": "{CANARY}"}} {CANARY}', {}),
    "not UTF-8": (f'{{"text": "{CANARY}'.encode() + b'\xff"}', {}),
    "field twice": (f'{{"text": "a", "{CANARY}": "b", "{CANARY}": "c"}}', {}),
    "a list": (f'["{CANARY}"]', {}),
    "a text": (f'"{CANARY}"', {}),
    "nested": (f'{{"text": "{CANARY}", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", {}),
    "many digits": (f'{{"text": "{CANARY}", "x": {"4711" * 2000}}}', {}),
    "no field": ({CANARY: CANARY, "by": CANARY}, {}),
    "a number in the field": ({"text": 4711, "by": CANARY}, {"form": RecordForm.TEXT}),
    "a list in the field": ({"text": [CANARY]}, {}),
    "surrogate": (f'{{"text": "{CANARY} \\ud800"}}', {}),
    "two ways": ({"text": CANARY, "messages": SAID}, {}),
    "prompt is no text": ({"prompt": [CANARY], "completion": CANARY}, {}),
    "completion is no text": ({"prompt": CANARY, "completion": {CANARY: CANARY}}, {}),
    "no completion": ({"prompt": CANARY, CANARY: CANARY}, {"form": RecordForm.COMPLETION}),
    "messages are a text": ({"messages": CANARY}, {}),
    "messages are an object": ({"messages": {CANARY: CANARY}}, {}),
    "no messages": ({"text": CANARY, CANARY: 1}, {"form": RecordForm.MESSAGES}),
    "message is a text": ({"messages": [CANARY]}, {}),
    "message without content": ({"messages": [{"role": "user", CANARY: CANARY}]}, {}),
    "unknown role": ({"messages": [{"role": CANARY, "content": CANARY}]}, {}),
    "surrogate in a message": (f'{{"messages": [{{"role": "user", "content": "{CANARY} \\udc00"}}]}}', {}),
    "no user": ({"text": CANARY, CANARY: CANARY}, USER),
    "user is a list": ({"text": CANARY, "by": [CANARY]}, USER),
    "user is unseen": ({"text": CANARY, "by": "\u200b"}, USER),
    "user is no Unicode": (f'{{"text": "a", "by": "{CANARY} \\ud800"}}', USER),
    "outside the vocabulary": ({"text": CANARY + "é"}, {"vocab_size": 128}),
}
TEMPLATED = {
    "system": [{"role": "system", "content": CANARY}, *SAID],
    "assistant first": SAID[::-1],
    "words of the template": [SAID[0], *SAID],
    "outside the template": [{"role": "user", "content": CANARY}, {"role": "assistant", "content": "bye", "x": CANARY}],
}
OTHER = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def write(folder: Path, line: str | bytes | dict, *before: dict) -> Path:
    content = json.dumps(line) if isinstance(line, dict) else line
    first = "".join(json.dumps(record) + "\n" for record in before).encode()
    path = folder / "data.jsonl"
    path.write_bytes(first + (content.encode() if isinstance(content, str) else content) + b"\n")
    return path


def shown(error: BaseException | None) -> Iterator[str]:
    """Return everything that could be printed of an error and of its causes, suppressed or not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield f"{error} {error!r} {error.args!r} {vars(error)!r}"
        yield "".join(traceback.format_exception_only(error))
        error = error.__cause__ or error.__context__


def check(work: Callable[[], Any]) -> str:
    with pytest.raises(FdpError) as caught:
        work()
    for words in shown(caught.value):
        for secret in (CANARY, "4711", "lophon"):
            assert secret not in words
    return str(caught.value)


@pytest.mark.parametrize("name", LINES)
def test_a_record_is_not_shown(name: str, tmp_path: Path) -> None:
    line, options = LINES[name]
    given: dict[str, Any] = {"vocab_size": 256} | options
    path = write(tmp_path, line)
    message = check(lambda: corpus.load(path, context=4, **given))
    assert "data.jsonl" in message
    assert "line 1" in message or "document 1" in message


@pytest.mark.parametrize("name", [name for name, (_, options) in LINES.items() if not options])
def test_a_record_is_not_shown_by_windows_or_in_a_list(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, LINES[name][0])
    for read in (lambda: datasets.load(path, context=1), lambda: datasets.load(path, context=1, tokenizer=text.BYTES)):
        if name != "two ways":
            check(read)
    listed = tmp_path / "list.json"
    listed.write_bytes(b"[" + path.read_bytes() + b"]")
    check(lambda: corpus.load(listed, context=4, vocab_size=256))


@pytest.mark.parametrize("name", TEMPLATED)
def test_a_record_is_not_shown_by_a_chat_template(name: str, tmp_path: Path) -> None:
    broken = NO_SYSTEM + "{% if messages[-1].x is defined %}{{ raise_exception(messages[-1].x) }}{% endif %}"
    tokenizer = text.load_tokenizer(make_tokenizer(tmp_path / "tokenizer", template=broken))
    path = write(tmp_path, {"messages": TEMPLATED[name]})
    assert "line 1, message" in check(lambda: corpus.read(path, tokenizer))


def test_a_record_is_not_shown_by_a_failing_tokenizer(tmp_path: Path) -> None:
    def encode(words: str) -> list[int]:
        raise RuntimeError(f"cannot encode {words!r}")

    broken = text.BYTES._replace(encode=encode, locate=encode)
    for record in ({"text": CANARY}, {"prompt": CANARY, "completion": CANARY}, {"messages": SAID}):
        path = write(tmp_path, record)
        assert "error in it (RuntimeError)" in check(lambda: corpus.read(path, broken))  # noqa: B023
    path = write(tmp_path, {"text": CANARY})
    check(lambda: datasets.load(path, context=1, tokenizer=broken._replace(end=0)))


def test_texts_and_token_files_are_not_shown(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": CANARY.encode() + b"\xff",
        "a.npy": CANARY.encode(),
        "b.npy": b"\x93NUMPY\x01\x00" + len(CANARY).to_bytes(2, "little") + CANARY.encode(),
        "a.bin": b"\x67\x12" * 8,  # 4711
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        check(lambda: datasets.load(path, context=1))  # noqa: B023
        check(lambda: corpus.load(path, context=1, vocab_size=256))  # noqa: B023
    np.save(tmp_path / "c.npy", np.full(9, 4711))
    check(lambda: datasets.load(tmp_path / "c.npy", context=1))


def test_other_records_and_owners_are_not_shown(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": CANARY}, OTHER)
    assert "line 2: expected messages like" in check(lambda: corpus.load(path, context=4, vocab_size=256))
    documents = join_documents([([1], [True]), ([2], [True])], [CANARY, CANARY], source="here")
    check(lambda: records(documents, context=1, vocab_size=9))
    path = write(tmp_path, {"text": CANARY, "by": CANARY})
    check(lambda: corpus.load(path, context=4, vocab_size=256, pack=PackUnit.OWNER))


def test_ranks_that_differ_show_neither_digest_nor_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {name: CANARY for name in agree.PRIVATE_SETTINGS} | {"steps": 3}
    monkeypatch.setattr(
        agree,
        "gather_values",
        lambda *_: [mine, {name: f"{CANARY}{CANARY}" for name in agree.PRIVATE_SETTINGS} | {"steps": 3}],
    )
    message = check(lambda: agree.check_agreement(mine | {"steps": 4}))
    assert "steps 4 on rank 0, 3 on rank 0" in message  # the first that differs is named, with what is public
    assert "another content of the data on rank 0 than on rank 1" in check(lambda: agree.check_agreement(mine))


def test_a_printed_dataset_shows_no_content(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": CANARY, "by": CANARY})
    ids = ", ".join(str(token) for token in CANARY.encode())
    sets: list[Any] = [datasets.load(path, context=3), corpus.load(path, context=99, vocab_size=256)]
    sets.append(corpus.load(path, context=99, vocab_size=256, **USER))
    for dataset in sets:
        for held in (dataset, getattr(dataset, "documents", None)):
            assert CANARY not in repr(held)
            assert CANARY.lower() not in repr(held)
            assert ids[:12] not in repr(held)


@pytest.mark.parametrize("name", ["no JSON", "no field", "messages are a text", "user is a list", "nested"])
def test_a_run_shows_no_content_on_screen(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, options = LINES[name]
    path = write(tmp_path, line)
    unit = ["--unit", "user", "--user-field", "by"] if options else ["--unit", "record"]
    with pytest.raises(SystemExit) as caught:
        main(["train", "--data", str(path), "--steps", "1", "--context", "4", "--json", *unit])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "line 1" in printed.err
    assert CANARY not in printed.err + printed.out
