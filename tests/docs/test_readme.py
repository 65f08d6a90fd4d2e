"""The README as a reader meets it: its code runs, its commands can be pasted, it is short."""

import importlib.util
import re
import runpy

from pathlib import Path

import pymc as pm
import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MOST_LINES = 120
COMMANDS = (
    'pip install ".[examples]" && python examples/quickstart.py',
    'pip install ".[test]" && python -m pytest -n 2',
)
# The package is in no index: such a command would install nothing, or something else.
NAMED_IN_AN_INDEX = re.compile(r"pip install\s+(?:-\S+\s+)*[\"']?pymc[-_]sghmc")


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def pages():
    generated = ROOT / "docs/_build"
    written = [page for page in (ROOT / "docs").rglob("*.md") if generated not in page.parents]
    return [README, ROOT / "CONTRIBUTING.md", *written]


@pytest.mark.parametrize(
    "run",
    [
        {"draws": 10, "tune": 10, "chains": 2},
        pytest.param({}, marks=pytest.mark.slow),  # as they stand
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # ArviZ, of so few draws
def test_the_python_blocks_run(tmp_path, monkeypatch, run):
    if importlib.util.find_spec("statsmodels") is None:
        pytest.skip("statsmodels brings the README's data: install the extra `test`")
    blocks = python_blocks(README.read_text(encoding="utf-8"))
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    sample = pm.sample
    monkeypatch.setattr(pm, "sample", lambda *args, **settings: sample(*args, **settings | run))
    runpy.run_path(str(script))


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_stands_alone_on_its_line(command):
    assert README.read_text(encoding="utf-8").splitlines().count(command) == 1


def test_nothing_is_installed_by_name():
    named = [page for page in pages() if NAMED_IN_AN_INDEX.search(page.read_text(encoding="utf-8"))]
    assert not named


def test_an_install_by_name_is_found():
    assert NAMED_IN_AN_INDEX.search("pip install pymc-sghmc")
    assert NAMED_IN_AN_INDEX.search('python -m pip install -U "pymc-sghmc[parquet]"')
    assert not NAMED_IN_AN_INDEX.search('python -m pip install ".[examples]"')
