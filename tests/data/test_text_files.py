"""Texts that are not UTF-8 are refused, with how to convert them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fdp.data import datasets
from fdp.types import FdpError
from tests.data.test_files import rows


@pytest.mark.parametrize(
    ("name", "encoding", "advice"),
    [
        ("a.csv", "latin-1", "in Excel save it as CSV UTF-8, or iconv -f latin1 -t utf-8 OLD > NEW, if it is Latin-1"),
        ("a.csv", "utf-16", "in Excel save it as CSV UTF-8, or iconv -f utf-16 -t utf-8 OLD > NEW"),
        ("a.txt", "latin-1", "convert the file.*iconv -f latin1 -t utf-8 OLD > NEW, if it is Latin-1"),
        ("a.txt", "utf-16", "convert the file.*iconv -f utf-16 -t utf-8 OLD > NEW"),
    ],
)
def test_a_file_in_another_encoding_is_refused_with_how_to_convert_it(
    name: str, encoding: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes("text\nÄpfel\n".encode(encoding))
    for read in (rows, partial(datasets.load, context=2)):
        with pytest.raises(FdpError, match=advice):
            read(tmp_path / name)
