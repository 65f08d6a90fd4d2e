"""Draw docs/images/architecture.svg: wings, their files, and which wing imports which.

    python docs/draw_architecture.py

Read off the imports; a test fails when the picture is out of date.
"""

import ast

from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/architecture.svg"
WIDTH, LINE, GAP, PAD, COLUMNS = 150, 15, 26, 8, 2  # of a file's place, in pixels
GROUND = "ground"


def imports(path):
    """Yield the first part below the package of each import from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pymc_sghmc":
            parts = node.module.split(".")[1:]
            yield from [parts[0]] if parts else [alias.name for alias in node.names]


def house():
    """Files by wing, and how many files of a wing import another."""
    package = ROOT / "pymc_sghmc"
    wings = {GROUND: sorted(p.stem for p in package.glob("*.py") if p.stem != "__init__")}
    arrows = Counter()
    for folder in sorted(p for p in package.iterdir() if (p / "__init__.py").exists()):
        files = [p for p in sorted(folder.glob("*.py")) if p.stem != "__init__"]
        wings[folder.name] = [p.stem for p in files]
        for path in files:
            arrows.update({(folder.name, other) for other in imports(path)} - {(folder.name,) * 2})
    return wings, {pair: n for pair, n in arrows.items() if pair[1] in wings}


def floors(wings, arrows):
    """Wings by floor, from the top: each right below the lowest of those that import it."""
    depth = {}

    def of(wing):
        if wing not in depth:
            depth[wing] = 1 + max((of(a) for a, b in arrows if b == wing), default=-1)
        return depth[wing]

    others = [wing for wing in wings if wing != GROUND]
    rows = [[w for w in others if of(w) == k] for k in range(1 + max(map(of, others)))]
    # where most is imported from stands on the left, below what imports it
    weight = {w: sum(n for (a, _), n in arrows.items() if a == w) for w in others}
    return [*(sorted(row, key=weight.get, reverse=True) for row in rows), [GROUND]]


def draw():
    """Return the picture as text."""
    wings, arrows = house()
    places, shapes, y = {}, [], PAD
    for row in floors(wings, arrows):
        heights, x = [], PAD + len(places) % 2 * GAP
        for wing in row:
            n_lines = -(-len(wings[wing]) // COLUMNS)
            height = 2 * PAD + (n_lines + 1) * LINE
            places[wing] = (x, y, COLUMNS * WIDTH, height)
            shapes.append(
                f'<rect x="{x}" y="{y}" width="{COLUMNS * WIDTH}" height="{height}" rx="6"/>'
                f'<text x="{x + PAD}" y="{y + LINE}" class="wing">{escape(wing)}</text>'
            )
            for i, name in enumerate(wings[wing]):
                left = x + PAD + i % COLUMNS * WIDTH
                shapes.append(
                    f'<text x="{left}" y="{y + (2 + i // COLUMNS) * LINE + 4}">'
                    f"{escape(name)}</text>"
                )
            heights.append(height)
            x += COLUMNS * WIDTH + GAP
        y += max(heights) + 2 * GAP
    lines = []
    for (a, b), n in sorted(arrows.items()):
        if b == GROUND:
            continue  # all wings stand on it
        (xa, ya, wa, ha), (xb, yb, wb, _) = places[a], places[b]
        below = sorted(w for w in wings if (a, w) in arrows and w != GROUND)
        above = sorted(w for w in wings if (w, b) in arrows)
        start = xa + wa * (1 + below.index(b)) / (1 + len(below))
        end = xb + wb * (1 + above.index(a)) / (1 + len(above))
        lines.append(
            f'<line x1="{start:.0f}" y1="{ya + ha}" x2="{end:.0f}" y2="{yb - 3}" '
            f'stroke-width="{0.6 + 0.3 * n:.1f}"><title>{a} imports {b}: {n} files</title></line>'
        )
    width = max(x + w for x, _, w, _ in places.values()) + PAD
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" '
            'font-family="sans-serif" font-size="12">',
            "<style>rect{fill:#f4f1ea;stroke:#8a7f6a}.wing{font-weight:bold}"
            "line{stroke:#4a6fa5;marker-end:url(#tip)}</style>",
            '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" '
            'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
            '<path d="M0 0L6 3L0 6z" fill="#4a6fa5"/></marker></defs>',
            f'<rect x="0" y="0" width="{width}" height="{y}" style="fill:white;stroke:none"/>',
            *lines,
            *shapes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE.relative_to(ROOT))
