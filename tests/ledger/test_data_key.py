"""The key of the data's owner: drawn once, readable by its owner only, and a fingerprint says nothing without it."""

from __future__ import annotations

import hashlib
import hmac
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fdp.ledger.data_key import KEY_FILE, DataKey, check_writable, files_digest, ledger_folder, load_key
from fdp.types import FdpError


def test_the_key_is_drawn_once_and_readable_by_its_owner_only(tmp_path):
    folder = tmp_path / "config" / "fdp"
    key = load_key(folder)
    assert load_key(folder) == key
    assert len(key.secret) == 32
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [KEY_FILE]
    assert load_key(tmp_path / "other") != key


def test_processes_that_create_it_at_once_get_one_key(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: load_key(tmp_path / "fdp"), range(16)))) == 1


def test_a_fingerprint_is_an_hmac_of_the_digest():
    key = DataKey(b"k" * 32)
    expected = hmac.new(b"k" * 32, b"samples abc", hashlib.sha256).hexdigest()
    assert key.fingerprint("samples", "abc") == f"{key.name}-{expected}"
    assert key.fingerprint("samples", "abd") != key.fingerprint("samples", "abc")
    assert DataKey(b"l" * 32).fingerprint("samples", "abc") != key.fingerprint("samples", "abc")
    assert key.secret.hex() not in repr(key)


def test_without_the_key_a_guess_of_the_data_is_not_confirmed(tmp_path):
    """Mutation: a plain digest as the fingerprint would contain the digest, or be computed from it."""
    digest = hashlib.sha256(b"the data").hexdigest()
    found = load_key(tmp_path).fingerprint("files", digest)
    assert digest not in found
    assert hashlib.sha256(f"files {digest}".encode()).hexdigest() not in found


@pytest.mark.parametrize("text", ["", "abc", "00" * 31, "zz" * 32])
def test_a_damaged_key_is_refused(tmp_path, text):
    load_key(tmp_path)
    (tmp_path / KEY_FILE).write_text(text)
    with pytest.raises(FdpError, match=r"ledger.key: expected 32 bytes in hexadecimal digits, got a damaged file"):
        load_key(tmp_path)


def test_a_key_that_others_can_read_is_refused(tmp_path):
    load_key(tmp_path)
    (tmp_path / KEY_FILE).chmod(0o644)
    with pytest.raises(FdpError, match=r"expected a key that its owner alone can read \(mode 600\), got 644"):
        load_key(tmp_path)


def test_a_lost_key_is_not_replaced_while_its_ledger_is_there(tmp_path):
    load_key(tmp_path)
    (tmp_path / "ledger.jsonl").write_text("{}\n")
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(FdpError, match="expected the key that the ledger beside it was written with, got no file"):
        load_key(tmp_path)


def test_a_folder_that_cannot_be_written_names_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for act in (load_key, check_writable):
        with pytest.raises(FdpError, match="--ledger off"):
            act(tmp_path / "file" / "fdp")
    check_writable(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()


def test_the_folder_of_the_ledger(monkeypatch, tmp_path):
    monkeypatch.delenv("FDP_LEDGER", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert ledger_folder(None) == tmp_path / "fdp"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert ledger_folder(None) == Path(os.path.expanduser("~")) / ".config" / "fdp"
    monkeypatch.setenv("FDP_LEDGER", "/team/ledger")
    assert ledger_folder(None) == Path("/team/ledger")
    assert ledger_folder("here") == Path("here")
    assert ledger_folder("off") is None
    with pytest.raises(FdpError, match=r"off to record nothing, got none; a folder: \./none"):
        ledger_folder("none")
    assert ledger_folder("./none") == ledger_folder(Path("none")) == Path("none")
    monkeypatch.setenv("FDP_LEDGER", "off")
    assert ledger_folder(None) is None


def test_the_digest_of_files_depends_on_their_contents_alone(tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    for path, text in zip((first, second, third), ("one", "two", "one")):
        path.write_text(text)
    assert files_digest([first, second]) == files_digest([second, third])
    third.write_text("onE")
    assert files_digest([first, second]) != files_digest([second, third])
