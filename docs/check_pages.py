"""Run the Python blocks of the pages, those of one page one after another.

Run ``python docs/check_pages.py [page.md ...]``; without names, all pages.
"""

import contextlib
import re
import runpy
import sys
import tempfile
import textwrap

from pathlib import Path

DOCS = Path(__file__).parent

if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent / "tests"))  # adding-a-sampler.md uses the oracle
    for page in [DOCS / name for name in sys.argv[1:]] or sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
        if not blocks:
            continue
        print(f"== {page.name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, page.stem.replace("-", "_") + ".py")
            script.write_text("\n".join(map(textwrap.dedent, blocks)), encoding="utf-8")
            with contextlib.chdir(folder):  # where what pages write may stay
                runpy.run_path(str(script), run_name="__main__")
