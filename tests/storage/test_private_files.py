"""Files that only their owner can read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fdp.storage.private_files import open_private
from fdp.types import FdpError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def never(handle: int, mode: int) -> None:
    raise AssertionError("a moment too late: others may have opened it")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
@pytest.mark.parametrize("mode", ["w", "x", "a", "wb", "xb"])
def test_a_new_file_is_0600_from_the_moment_it_exists(tmp_path, umask, mode, monkeypatch):
    if not umask & 0o600:
        monkeypatch.setattr(os, "fchmod", never)
    path, before = tmp_path / "file", os.umask(umask)
    try:
        with open_private(path, mode) as file:
            assert mode_of(path) == 0o600
            file.write(b"loss" if "b" in mode else "loss")
    finally:
        os.umask(before)
    assert path.read_text() == "loss"


def test_an_existing_file_is_restricted_before_it_is_written(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    with open_private(path, "w"):
        assert (mode_of(path), path.read_text()) == (0o600, "")


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="file"), open_private(tmp_path / "file", "w"):
        pass
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_a_file_system_without_modes_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("")
    path.chmod(0o644)
    monkeypatch.setattr(os, "fchmod", lambda handle, mode: None)
    with (
        pytest.raises(FdpError, match="expected a file that its owner alone"),
        open_private(path, "w") as file,
    ):
        file.write("loss")
    assert path.read_text() == ""


def test_reading_leaves_the_mode(tmp_path):
    path = tmp_path / "file"
    path.write_text("public")
    path.chmod(0o644)
    with open_private(path, "r") as file:
        assert file.read() == "public"
    assert mode_of(path) == 0o644


def test_text_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    code = "import sys, pathlib; from fdp.storage.private_files import write_private as write; "
    code += "write(pathlib.Path(sys.argv[1]), '\\u00e9\\udcff')"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], env=os.environ | locale, check=True)
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9\xff"
