"""Every decision is listed on the page of decisions: they are no entries of the sidebar."""

from pathlib import Path

from sphinx.util import logging

__all__ = ["setup", "unlisted"]

FOLDER = "development/decisions"

_log = logging.getLogger(__name__)


def unlisted(folder: Path) -> list[str]:
    """Names of the decisions in a folder that its ``index.md`` has no link to."""
    text = (folder / "index.md").read_text(encoding="utf-8")
    return [page.name for page in sorted(folder.glob("[0-9]*.md")) if f"({page.name})" not in text]


def _check(app):
    for name in unlisted(Path(app.srcdir, FOLDER)):
        _log.warning("%s/%s is not listed in %s/index.md", FOLDER, name, FOLDER)


def setup(app):
    """Tell Sphinx to look for decisions that are not listed."""
    app.connect("builder-inited", _check)
    return {"version": "1", "parallel_read_safe": True}
