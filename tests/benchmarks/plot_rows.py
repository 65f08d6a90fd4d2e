"""Draw the time to 400 effective draws against the number of rows: SGHMC and NUTS.

    python tests/benchmarks/versus.py --n 10000 --n 100000 --n 1000000 \
        --only nutpie --only sghmc --only sghmc-auto --markdown > rows.out
    python tests/benchmarks/plot_rows.py rows.out --folder docs/images

The files hold what ``versus.py`` prints. Of several runs with as many rows the last one counts.
Writes rows.png, and rows.json with the figures drawn, from which the picture can be drawn again.
"""

import argparse
import json

from pathlib import Path

from matplotlib.figure import Figure

TITLES = {"nutpie": "NUTS (nutpie)", "sghmc-auto": 'SGHMC(batch_size="auto")'}
COLOURS = {"nutpie": "#5f6b76", "sghmc-auto": "#c8102e"}
SHOWN = ("seconds_to_400", "seconds", "min_ess_bulk", "extrapolated")
TICKS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h"}


def read(paths):
    """Return the figures of both samplers by number of rows, with the versions."""
    result = {"rows": {}}
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        printed = json.loads(next(line for line in lines if line.startswith("{")))
        for key in ("unknowns", "chains", "cores", "versions"):
            result[key] = printed[key]
        for n, block in printed["rows"].items():
            runs = {name: block["runs"][name] for name in TITLES}
            result["rows"][n] = {
                "runs": {name: {key: run[key] for key in SHOWN} for name, run in runs.items()}
            }
    result["rows"] = dict(sorted(result["rows"].items(), key=lambda item: int(item[0])))
    return result


def in_words(seconds):
    """Return a time as people say it: 12 s, 18 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def draw(result, path):
    """Draw a line for each sampler; hollow points are extrapolated."""
    figure = Figure(figsize=(8, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    rows = [int(n) for n in result["rows"]]
    for name, title in TITLES.items():
        runs = [block["runs"][name] for block in result["rows"].values()]
        seconds = [run["seconds_to_400"] for run in runs]
        axes.loglog(rows, seconds, color=COLOURS[name], linewidth=2.5)
        for n, run in zip(rows, runs, strict=True):
            draw_point(axes, n, run, COLOURS[name])
        axes.annotate(
            title,
            (rows[-1], seconds[-1]),
            xytext=(14, 0),
            textcoords="offset points",
            color=COLOURS[name],
            fontsize=13,
            fontweight="bold",
            verticalalignment="center",
        )
    label_axes(axes, rows)
    axes.set_title(
        "Time to 400 effective draws of every coefficient\n"
        f"(logistic regression with {result['unknowns']} predictors, {result['chains']} chains on "
        f"{result['cores']} cores)",
        loc="left",
        fontsize=13,
        pad=14,
    )
    figure.savefig(path, dpi=110)


def draw_point(axes, n, run, colour):
    """Draw a point with its time: filled if measured, hollow if extrapolated."""
    extrapolated = run["extrapolated"]
    axes.plot(
        n,
        run["seconds_to_400"],
        marker="o",
        markersize=10,
        markeredgewidth=2.5,
        markeredgecolor=colour,
        markerfacecolor="white" if extrapolated else colour,
    )
    note = " (extrapolated)" if extrapolated else ""
    axes.annotate(
        in_words(run["seconds_to_400"]) + note,
        (n, run["seconds_to_400"]),
        xytext=(-4, 11),
        textcoords="offset points",
        color=colour,
        fontsize=12,
        horizontalalignment="right" if extrapolated else "center",
    )


def label_axes(axes, rows):
    """Label both axes in the units of daily life."""
    axes.set_xlim(rows[0] / 1.6, rows[-1] * 14)
    axes.set_ylim(1, 3600)
    axes.set_xticks(rows, [f"{n:,}" for n in rows], fontsize=12)
    axes.set_yticks(list(TICKS), list(TICKS.values()), fontsize=12)
    axes.minorticks_off()
    axes.set_xlabel("rows of data", fontsize=12)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="what versus.py printed, or rows.json")
    parser.add_argument("--folder", type=Path, default=Path(), help="where both files go")
    args = parser.parse_args()
    result = read(args.files)
    (args.folder / "rows.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    draw(result, args.folder / "rows.png")


if __name__ == "__main__":
    main()
