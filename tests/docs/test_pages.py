"""The code blocks of the pages are complete Python; `docs/check_pages.py` runs them."""

import ast
import sys

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import check_pages  # noqa: E402

PAGES = [page.relative_to(DOCS).as_posix() for page in check_pages.pages()]


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_are_python(page):
    ast.parse("\n".join(check_pages.blocks(DOCS / page)), filename=page)


@pytest.fixture
def two_pages(tmp_path):
    """A page whose second block needs the first, and one that fails."""
    good = tmp_path / "good.md"
    good.write_text("```python\nx = 1\n```\n\n- in a list\n\n  ```python\n  assert x == 1\n  ```\n")
    bad = tmp_path / "bad.md"
    bad.write_text("```python\nraise ValueError\n```\n")
    return good, bad


def test_the_blocks_of_a_page_share_their_names(two_pages):
    assert check_pages.run(two_pages[0]) is None


def test_a_page_that_fails_is_named_and_the_next_one_runs(two_pages, capfd):
    good, bad = two_pages
    with pytest.raises(SystemExit) as stopped:
        check_pages.main([str(bad), str(good)])
    assert stopped.value.code == 1
    printed = capfd.readouterr()
    assert f"FAILED {bad}: exit status 1" in printed.out
    assert f"{good}: passed" in printed.out
    assert "ValueError" in printed.err
