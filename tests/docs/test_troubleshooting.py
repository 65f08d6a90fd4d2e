"""Each message that a user may see is explained on the page of troubleshooting, and none that is gone.

The page quotes the stable words of each message in a block quote, with "…" for names and numbers. A message is
found there if some of its words, in a row, are quoted.
"""

import ast
import re

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, PAGE = ROOT / "pymc_sghmc", ROOT / "docs/help/troubleshooting.md"
IN_A_ROW = 5  # words of a message that must be quoted; of shorter ones all between two holes
PROSE = 5  # words from which a string that is neither raised nor logged may be part of a message
LOGGED = {"warn", "warning", "error", "exception", "critical", "info", "log"}
LOGGERS = {"_log", "warnings", "logging"}

# Strings that no user sees: words by which they are known, and why they aren't on the page.
INTERNAL = {
    "update takes more than one gradient": "caught: inner steps are then made in Python",
    "not positive definite": "caught: the inverse Hessian begins anew",
    "not finite": "caught: the inverse Hessian begins anew",
    "a stored state is of": "part of the message on a damaged file",
    "a stored state has a": "part of the message on a damaged file",
    "can't be stored": "part of the message on a state that can't be stored",
    "def inner_loop state normals": "source code that Numba compiles",
    "choosing how far effects are centred": "a phase of set-up, which is shown",
    "fitting a Gaussian to the posterior": "a phase of set-up, which is shown",
    "measuring the noise of gradients": "a phase of set-up, which is shown",
    "placing the nodes of quadrature": "a phase of set-up, which is shown",
    "setting up task fields sampler": "a phase of set-up, which is shown",
    "from a pool of": "part of the line on settings",
    "passes over the data": "part of the line on settings",
    "gradients of all data": "a line of the bias report that needs no explanation",
    "Temperatures target 1": "a heading in the bias report",
    "on average": "part of the sentence on standard deviations in the bias report",
    "not known for each": "part of the sentence on standard deviations in the bias report",
    "parameters with the largest deviations": "a heading in the bias report",
}


def words(text):
    """The words of a text in lower case, without what Markdown or Python puts around them."""
    return re.findall(r"[^\W_]+(?:['’_][^\W_]+)*", text.lower())


def pieces(node):
    """The words between the holes of a string or a sum of strings, as lists."""
    found = []
    if isinstance(node, ast.FormattedValue | ast.Subscript):
        found += pieces(node.value)  # neither a format nor a key is shown
    elif isinstance(node, ast.Constant):
        found += [words(node.value)] if isinstance(node.value, str) else []
    else:
        for child in ast.iter_child_nodes(node):
            found += pieces(child)
    return [piece for piece in found if piece]


def is_logged(node):
    """Whether a call warns or logs."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOGGED
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
    )


def messages(path_or_code, prose=PROSE):
    """Return line and pieces of all that is raised, warned of or logged, and of other prose."""
    if isinstance(path_or_code, Path):
        path_or_code = path_or_code.read_text(encoding="utf-8")
    tree = ast.parse(path_or_code)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }

    def visit(node):
        if id(node) in docstrings:
            return
        if isinstance(node, ast.Raise) or is_logged(node):
            said = node.exc if isinstance(node, ast.Raise) else node
            if found := pieces(said) if said else []:
                yield node.lineno, found
            return
        if isinstance(node, ast.JoinedStr | ast.Constant):
            found = pieces(node)
            if (
                sum(word[:2].isalpha() and len(word) > 1 for piece in found for word in piece)
                >= prose
            ):
                yield node.lineno, found
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return list(visit(tree))


def runs(piece, length):
    """All runs of so many words of a piece."""
    return {tuple(piece[i : i + length]) for i in range(len(piece) - length + 1)}


def quotes(page):
    """The words of each part of a quote, between its holes."""
    lines = "\n".join(line if line.startswith(">") else "\n" for line in page.splitlines())
    quoted = re.split(r"\n(?:>\s*)?\n|…", re.sub(r"^> ?", "", lines, flags=re.MULTILINE))
    return [found for found in map(words, quoted) if found]


def is_quoted(message, quoted):
    """Whether enough words in a row of a message are in one of the quotes."""
    longest = max(message, key=len)
    if len(longest) < IN_A_ROW:
        return longest in quoted
    known = set().union(*(runs(quote, IN_A_ROW) for quote in quoted))
    return any(runs(piece, IN_A_ROW) & known for piece in message)


def is_named(message, known):
    """Whether a piece of the message begins with these words, or is all of them where they are few."""
    known = words(known)
    found = [piece for piece in message if piece[: len(known)] == known]
    return any(len(known) > 3 or piece == known for piece in found)


def is_internal(message):
    return any(is_named(message, known) for known in INTERNAL)


PAGE_QUOTES = quotes(PAGE.read_text(encoding="utf-8"))
FILES = sorted(PACKAGE.rglob("*.py"))


def name(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_each_message_is_on_the_page(path):
    missing = [
        f"{name(path)}:{line}: {' … '.join(' '.join(piece) for piece in message)}"
        for line, message in messages(path)
        if not is_quoted(message, PAGE_QUOTES) and not is_internal(message)
    ]
    assert not missing, "quote them in docs/help/troubleshooting.md, or name them in INTERNAL"


def test_each_quote_is_in_the_package():
    said = {" ".join(quote) for quote in PAGE_QUOTES}
    for path in FILES:
        for _, message in messages(path, prose=1):
            texts = [f" {' '.join(piece)} " for piece in message]
            said -= {quote for quote in said if any(f" {quote} " in text for text in texts)}
    assert not said, "no message of the package has these words any more"


def test_each_exception_is_in_the_package():
    unused = set(INTERNAL)
    for path in FILES:
        for _, message in messages(path, prose=1):
            unused -= {known for known in unused if is_named(message, known)}
    assert not unused, "take them off the list"


@pytest.mark.parametrize(
    "code",
    [
        'raise ValueError("a new complaint about the colour of rows")',
        'raise ValueError(f"colour={x!r}: rows of {n} colours")',
        'raise ValueError("no colour")',
        'warnings.warn("a colour that nobody has explained", UserWarning)',
        '_log.warning(f"{sampler}: colours are gone")',
        'def refused(): return "this colour can\'t be told from another one"',
    ],
)
def test_a_message_that_is_not_on_the_page_is_found(code):
    [(_, message)] = messages(code)
    assert not is_quoted(message, PAGE_QUOTES)
    assert not is_internal(message)


def test_names_in_holes_and_markup_make_no_difference():
    page = "## A heading\n\n> …: `colours` of … rows\n> aren't *known* here.\n>\n> other\n\nText.\n"
    assert quotes(page) == [["colours", "of"], ["rows", "aren't", "known", "here"], ["other"]]
    code = """raise ValueError(f"{x}: {name} has rows aren't known " "here and there")"""
    [(_, message)] = messages(code)
    assert not is_quoted(message, [["rows", "aren't"]])
    assert is_quoted(message, [["has", "rows", "aren't", "known", "here"]])
