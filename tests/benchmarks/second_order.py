"""Effective draws per second, first and second order, and nutpie's: logistic regression as N grows.

    python tests/benchmarks/second_order.py [--rows 10000 100000 1000000] [--before FOLDER]
        [--draws 4000] [--turns 3] [--nutpie] [--markdown]

50 coefficients, predictors with standard deviations from 1 to .18 (condition number 30), logits of
standard deviation about 1. Each run is ``pm.sample`` with one chain in a process of its own, the
ways in turns:

    before           SGHMC(batch_size=500), of the checkout in FOLDER (this one where none is given)
    second order     SGHMC(batch_size="auto", gradient="second_order")
    nutpie           200 + 200 draws, one turn, where ``--nutpie`` asks for it and it is installed

ESS is the least bulk effective size over the coefficients. ``ess_per_second`` takes the processor
time of the process from the end of tuning to the last draw; ``whole`` that from the call of
``pm.sample`` to its return; ``build`` seconds of making the step, set-up included and compilation, as
found in PyTensor's caches on disk (each way is built once beforehand). Medians over the turns.
Prints one line of JSON, with ``--markdown`` a table.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings

from pathlib import Path

import numpy as np
import report

from checkouts import ONE_THREAD

ROOT = Path(__file__).parents[2]
D, TUNE = 50, 1000
COLUMNS = {
    "rows": "rows",
    "steps": "steps a draw",
    "learning_rate": "η",
    "microseconds": "µs a draw",
    "ess": "least ESS",
    "ess_per_second": "ESS/s",
    "whole": "ESS/s, whole",
    "build": "set-up, s",
}
WAYS = {
    "before": {"batch_size": 500},
    "second order": {"batch_size": "auto", "gradient": "second_order"},
}


def model_of(n_rows):
    import pymc as pm

    rng = np.random.default_rng(0)
    scales = np.geomspace(1, 30**-0.5, D)
    X = rng.standard_normal((n_rows, D)) * scales
    logits = X @ (rng.standard_normal(D) / np.linalg.norm(scales))
    y = (rng.random(n_rows) < 1 / (1 + np.exp(-logits))).astype("int8")
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=D)
        pm.Bernoulli("y", logit_p=pm.math.dot(pm.Data("X", X), beta), observed=y)
    return model


def least_ess(draws):
    import arviz as az

    from untouched import over_unknowns

    return float(over_unknowns(az.ess, draws).min())


def run(way, n_rows, draws, seed):
    """One run, as a dict of figures; ``draws`` of 0 builds the step alone."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import pymc as pm

    from pymc_sghmc import SGHMC

    with model_of(n_rows):
        if way == "nutpie":
            began = time.process_time()
            idata = pm.sample(
                200, tune=200, chains=1, cores=1, nuts_sampler="nutpie", progressbar=False,
                random_seed=seed, compute_convergence_checks=False,
            )  # fmt: skip
            seconds = time.process_time() - began
            ess = least_ess(idata.posterior["beta"].values)
            # tuning and draws take the same trajectories, as a rule: half of the time is the draws'
            return {"ess": ess, "ess_per_second": 2 * ess / seconds, "whole": ess / seconds}
        began = time.process_time()
        step = SGHMC(**WAYS[way])
        build = time.process_time() - began
        if not draws:
            return {}
        times = []

        def look(trace, draw):
            if draw.draw_idx in (TUNE - 1, TUNE + draws - 1):
                times.append(time.process_time())

        began = time.process_time()
        idata = pm.sample(
            draws, tune=TUNE, chains=1, cores=1, step=step, progressbar=False, random_seed=seed,
            callback=look, compute_convergence_checks=False,
        )  # fmt: skip
        whole = time.process_time() - began
    tuned, ended = times
    ess, statistics = least_ess(idata.posterior["beta"].values), idata.sample_stats
    return {
        "ess": ess,
        "ess_per_second": ess / (ended - tuned),
        "whole": ess / whole,
        "microseconds": 1e6 * (ended - tuned) / draws,
        "build": build,
        "rows": 500 if way == "before" else step.tuner.gradient.data.batch_sizes[0],
        "learning_rate": float(statistics["learning_rate"].values[0, -1]),
        "steps": round(float((statistics["draw_weight"] / statistics["learning_rate"])[0, -1])),
    }


def in_process(way, n_rows, draws, seed, folder):
    """The same in a process of its own, with the package of a folder."""
    command = [sys.executable, __file__, "--serve", way, str(n_rows), str(draws), str(seed)]
    path = os.pathsep.join([str(folder), str(Path(__file__).parent)])
    done = subprocess.run(
        command, env={**os.environ, **ONE_THREAD, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--before", type=Path, default=ROOT)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--nutpie", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        way, *numbers = args.serve
        print(json.dumps(run(way, *map(int, numbers))))
        return
    machine, rows = report.machine(), {}
    for n_rows in args.rows:
        folders = {"before": args.before.resolve(), "second order": ROOT}
        found = {way: [] for way in folders}
        for way, folder in folders.items():
            in_process(way, n_rows, 0, 0, folder)
        for seed in range(args.turns):
            for way, folder in folders.items():
                found[way].append(in_process(way, n_rows, args.draws, seed, folder))
        if args.nutpie:
            found["nutpie"] = [in_process("nutpie", n_rows, 200, 1, ROOT)]
        for way, runs in found.items():
            row = {key: float(np.median([one[key] for one in runs])) for key in runs[0]}
            rows[f"{n_rows} {way}"] = row
            report.progress(f"{n_rows} {way}", row)
    packages = "pymc", "pytensor", "numba", "nutpie", "numpy"
    result = {"benchmark": "second_order", "draws": args.draws, "rows": rows}
    report.print_json(result | report.closing(machine, *packages))
    if args.markdown:
        table = [[name, *(row.get(key) for key in COLUMNS)] for name, row in rows.items()]
        print(report.markdown_table(["N, way", *COLUMNS.values()], table))


if __name__ == "__main__":
    main()
