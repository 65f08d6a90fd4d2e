"""Variance of a gradient from one row, first and second order, on every reference posterior.

    python tests/benchmarks/noise.py [--name wells htru2 ...] [--markdown]

V is the variance of the gradient in coordinates in which the posterior has unit scale and curvature
1, of a minibatch of one row; of n rows it is the n-th part. Exact: over all rows, each order with
its own probabilities of drawing them, at 4 points drawn around the centre with the posterior's width
and at the same twice as far out. The mean over the directions, and the largest in any; "ratio" is
first by second order. "left" is the largest V of 500 rows with second order, which is what budgets
are made by.

Prints one line of JSON and with ``--markdown`` a table; each row goes to standard error as soon as
it is there.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import logging
import warnings

from untouched import BATCH, data_folder, references

import numpy as np
import report

from model_collection import models_of

from pymc_sghmc import SGHMC
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.second_order_noise import noise_at

N_POINTS = 4
DISTANCES = 1.0, 2.0  # posterior sds


def run(name):
    """One row."""
    model = models_of("real")[name].make(data_folder()).model
    with model:
        step = SGHMC(
            batch_size=BATCH, gradient="second_order", compile_kwargs={"mode": "FAST_COMPILE"}
        )
    second, centre = step.tuner.gradients[2], step.tuner.setup.fit
    row = {"N": second.data.n_rows[0], "d": second.density.d}
    if second.anchor is None:
        return row | {"failed": "second order is refused"}
    around = centre.metric
    z = np.random.default_rng(0).standard_normal((N_POINTS, row["d"]))
    points = [centre.mean + far * around.to_theta(x) for far in DISTANCES for x in z]
    found = {"second": noise_at(second, points, around)}
    first = ControlVariates(step.tuner.gradient)
    first.set_centre(centre.mean, centre.metric)
    try:
        kept = second.anchor
        second.anchor = kept._replace(tables=levels(second, centre), order=first.anchor.order)
        found["first"] = noise_at(second, points, around)
    finally:
        second.anchor = kept
    for order, by_point in found.items():
        V = np.sum(by_point, axis=1).reshape(len(DISTANCES), N_POINTS, -1).mean(axis=1)
        row[order] = {"mean": V.mean(axis=1).tolist(), "largest": V.max(axis=1).tolist()}
    return row


def levels(second, centre):
    """Tables with which "second order" is first order: each row's c at the centre, without slopes."""
    position = centre.mean.astype(second.density.dtype)

    def cotangents(position, *inputs):
        groups = range(len(second.quadratics))
        zetas = second.derivatives.zetas(position[None], *inputs)
        of_groups = [second.first(zetas[k], k, inputs) for k in groups]
        return [np.column_stack([found.log_likelihood[0], found.c[0]]) for found in of_groups]

    found = second.passes.tables(cotangents, position, second.anchor.order)
    return [
        np.column_stack([np.zeros(len(c)), c, np.zeros((len(c), q.size - 1 - q.m))])
        for c, q in zip(found, second.quadratics, strict=True)
    ]


def table(rows):
    titles = ["", "N", "d"]
    titles += [f"{order}, {far:g} sd" for order in ("first", "second") for far in DISTANCES]
    titles += [f"ratio, {far:g} sd" for far in DISTANCES] + ["left, 2 sds"]
    lines = []
    for name, row in rows.items():
        if "failed" in row:
            lines.append([f"{name}: {row['failed']}", row["N"], row["d"], *[None] * 7])
            continue
        first, second = row["first"]["mean"], row["second"]["mean"]
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        left = row["second"]["largest"][-1] / BATCH
        lines.append([name, row["N"], row["d"], *first, *second, *ratios, left])
    return report.markdown_table(titles, lines)


def main():
    names = [loader.__name__ for loader in references.LARGE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    machine, rows = report.machine(), {}
    for name in args.name:
        rows[name] = run(name)
        report.progress(name, rows[name])
    packages = "numpy", "pymc", "pytensor", "pymc-sghmc"
    report.print_json({"benchmark": "noise", "runs": rows, **report.closing(machine, *packages)})
    if args.markdown:
        print(table(rows))


if __name__ == "__main__":
    main()
