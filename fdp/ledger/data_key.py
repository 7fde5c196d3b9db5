"""The secret key of the data's owner, and keyed fingerprints of data.

    fingerprint = <name of the key>-<HMAC-SHA-256(key, digest of the data)>

The key is drawn once, stays with whoever holds the data (mode 0600) and is not written anywhere else. A model's folder
carries the fingerprint alone: whoever has the key can tell that two models were trained on the same data; without
the key, a guess of the data cannot be confirmed.

    folder   --ledger, else $FDP_LEDGER, else $XDG_CONFIG_HOME/fdp, else ~/.config/fdp

    >>> key = load_key(ledger_folder(None))
    >>> key.fingerprint("samples", data_digest(dataset))
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fdp.storage.private_files import OWNER_ONLY, disk_errors, open_private, sync_folder
from fdp.types import FdpError

KEY_FILE = "ledger.key"
KEY_BYTES = 32
OFF = "off"
VARIABLE = "FDP_LEDGER"
CHUNK_BYTES = 1 << 20


class DataKey(NamedTuple):
    """The secret key."""

    secret: bytes

    def __repr__(self) -> str:
        return f"DataKey({self.name})"  # the secret never reaches a log or a traceback

    @property
    def name(self) -> str:
        """Eight digits that tell keys apart, and reveal nothing of the secret."""
        return self.sign("name")[:8]

    def sign(self, text: str) -> str:
        """Return the HMAC-SHA-256 of a text."""
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()

    def fingerprint(self, kind: str, digest: str) -> str:
        """Return the keyed fingerprint of a digest; ``kind`` says of what, such as "samples" or "files"."""
        return f"{self.name}-{self.sign(f'{kind} {digest}')}"


def ledger_folder(given: str | Path | None) -> Path | None:
    """Return the folder of key and ledger: ``given``, else the environment's, else the user's; None for ``off``.

    A word that others use for ``off`` is refused: it would make a folder of that name, and record there.
    """
    chosen = os.fspath(given) if given is not None else os.environ.get(VARIABLE)
    if chosen == OFF:
        return None
    if chosen in ("none", "None", "no", "false") and not isinstance(given, Path):
        raise FdpError(f"ledger: expected a folder, or {OFF} to record nothing, got {chosen}; a folder: ./{chosen}")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path("~/.config").expanduser()) / "fdp"


def load_key(folder: Path, *, create: bool = True) -> DataKey:
    """Return the key in ``folder``; draw one if there is none, unless a ledger there was written with another.

    Guarantees:
      - of several processes that create it at once, all get the same key;
      - a key that others can read is refused.
    """
    path = folder / KEY_FILE
    if not path.exists():
        if (folder / "ledger.jsonl").exists() or not create:
            raise FdpError(
                f"{path}: expected the key that the ledger beside it was written with, got no file; put a copy of the "
                f"key back, or begin a new ledger with --ledger FOLDER (or {VARIABLE}), which knows of no earlier run"
            )
        _create_key(path)
    with disk_errors(path):
        mode = path.stat().st_mode & 0o777
        text = path.read_text()
    if mode & 0o077:
        raise FdpError(
            f"{path}: expected a key that its owner alone can read (mode {OWNER_ONLY:o}), got {mode:o}; whoever has "
            f"read it can confirm a guess of your data. chmod 600 it if nobody has"
        )
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise FdpError(f"{path}: expected {KEY_BYTES} bytes in hexadecimal digits, got a damaged file; put a copy back")
    return DataKey(secret)


def files_digest(files: Sequence[Path]) -> str:
    """Return SHA-256 of the contents of files, whatever their names and order: the data before it is tokenised."""
    contents = []
    for file in files:
        digest = hashlib.sha256()
        with open(file, "rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        contents.append(digest.hexdigest())
    return hashlib.sha256(" ".join(sorted(contents)).encode()).hexdigest()


def _create_key(path: Path) -> None:
    """Write a new key, complete before it has its name; keep the one of a process that was faster."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_private(partial, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            pass
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path.parent, error) from error


def check_writable(folder: Path) -> None:
    """Raise if no ledger could be written to ``folder``; create nothing."""
    there = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise _cannot_write(folder, f"{there} cannot be written")


def _cannot_write(folder: Path, why: object) -> FdpError:
    return FdpError(
        f"{folder}: expected a folder for your ledger that can be written, got an error: {why}. Name another one with "
        f"--ledger FOLDER (or {VARIABLE}), or train without a record of what is spent: --ledger off"
    )
