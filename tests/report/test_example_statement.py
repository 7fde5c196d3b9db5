"""The example of a statement in the documentation is what the code writes."""

from __future__ import annotations

import pytest

from tests.report.example_statement import PAGE, rendered_page


@pytest.mark.long
def test_the_example_on_the_page_is_what_the_code_writes():
    assert PAGE.read_text() == rendered_page(), "run: python -m tests.report.example_statement"
