"""Run the Python blocks of the pages, those of one page one after another.

Run ``python docs/check_pages.py [page.md ...]``; without names, all pages. Pages that Sphinx
executes, and decisions, are left out. Each page runs in a process and a temporary folder of its
own. A page that fails does not end the check: all failures are listed at the end.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time

from pathlib import Path

DOCS = Path(__file__).resolve().parent
LEFT_OUT = (DOCS / "_build", DOCS / "development/decisions")
TIMEOUT = 900  # seconds that a page may take


def pages():
    """Return the pages of the site, without those that `LEFT_OUT` holds."""
    found = sorted(DOCS.rglob("*.md"))
    return [page for page in found if not any(page.is_relative_to(left) for left in LEFT_OUT)]


def blocks(page):
    """Return the code of the Python blocks, in the order of the page."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for code in found]


def is_notebook(page):
    """Whether Sphinx executes the page."""
    header = page.read_text(encoding="utf-8").split("\n---\n")[0]
    return header.startswith("---") and "kernelspec:" in header


def run(page):
    """Run the blocks of a page; return what went wrong, or None."""
    environment = dict(os.environ)
    environment.setdefault("MPLBACKEND", "agg")
    # adding-a-sampler.md uses the tests' models
    search_path = [str(DOCS.parent / "tests"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    with tempfile.TemporaryDirectory() as folder:
        # not bambi.py: the page imports the package of that name
        script = Path(folder, "page_" + page.stem.replace("-", "_") + ".py")
        script.write_text("\n".join(blocks(page)), encoding="utf-8")
        command = [sys.executable, str(script)]
        try:
            finished = subprocess.run(command, cwd=folder, env=environment, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"not done after {TIMEOUT} s"
    if finished.returncode:
        return f"exit status {finished.returncode}"
    return None


def chosen_pages(names):
    """Return the pages with these paths, below the working directory or below ``docs``."""
    paths = [Path(name) if Path(name).exists() else DOCS / name for name in names]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        sys.exit(f"No such page: {', '.join(missing)}.")
    return [path.resolve() for path in paths]


def main(names):
    """Run the pages, print seconds, and fail if one of them fails."""
    failures = {}
    all_seconds = 0.0
    for page in chosen_pages(names) or pages():
        if is_notebook(page) or not blocks(page):
            continue
        title = page.relative_to(DOCS) if page.is_relative_to(DOCS) else page
        print(f"== {title}", flush=True)
        start = time.perf_counter()
        failure = run(page)
        seconds = time.perf_counter() - start
        all_seconds += seconds
        print(f"== {title}: {failure or 'passed'}, {seconds:.0f} s", flush=True)
        if failure:
            failures[title] = failure
    print(f"\nAll pages took {all_seconds:.0f} s.")
    for title, failure in failures.items():
        print(f"FAILED {title}: {failure}")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="pages to run; all if none is named")
    main(parser.parse_args().pages)
