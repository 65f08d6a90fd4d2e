"""What a draw costs in two checkouts of this package, in turns of one run.

    python tests/benchmarks/checkouts.py BEFORE [--after .] [--work NAME ...] [--turns 60]

BEFORE and ``--after`` are folders that hold ``pymc_sghmc``. Each has a process with the same model
and settings, and they take turns of about 50 ms: a machine that others use as well changes its pace
for both. Microseconds of processor time per draw, medians over the turns; ``ratio`` is the median
over turns of after by before, ``error`` its standard error from the spread of the turns. Works:

    logistic           100,000 rows of 50 predictors, batches of 500, settings by hand, Euler
    defaults           the same, settings found by the step: control variates, BAOAB, preconditioner
    tuning             the same while it tunes
    sgld               the same with SGLD
    python             defaults with one inner step per draw, which Python makes: the fixed costs
    double_well        U = x⁴ − 2x², no data
    several            three unknowns, two observed variables, Student's t, settings found

Prints one line of JSON.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings

from pathlib import Path

import numpy as np

WORKS = ("logistic", "defaults", "tuning", "sgld", "python", "double_well", "several")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
BY_HAND = {"learning_rate": 1e-6, "preconditioner": None, "gradient": "plain"}


def model_of(work):
    import pymc as pm

    rng = np.random.default_rng(0)
    if work == "double_well":
        with pm.Model() as model:
            x = pm.Flat("x")
            pm.Potential("energy", 2 * x**2 - x**4)
        return model
    n, d = (20_000, 10) if work == "several" else (100_000, 50)
    X = rng.standard_normal((n, d))
    eta = X @ rng.standard_normal(d) / np.sqrt(d)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=d)
        if work == "several":
            sigma = pm.HalfNormal("sigma", 1)
            mu = pm.math.dot(pm.Data("X", X), beta)
            pm.StudentT("y", nu=4, mu=mu, sigma=sigma, observed=eta + rng.standard_t(4, n))
            shift = pm.Normal("shift", 0, 1)
            pm.Poisson("k", pm.math.exp(shift + 0.3 * mu), observed=rng.poisson(np.exp(0.3 * eta)))
        else:
            y = rng.binomial(1, 1 / (1 + np.exp(-eta)))
            pm.Bernoulli("y", logit_p=pm.math.dot(pm.Data("X", X), beta), observed=y)
    return model


def step_of(work, model):
    from pymc_sghmc import SGHMC, SGLD

    with model:
        if work == "double_well":
            settings = {"friction": 0.1, "noise_estimate": None, "integrator": "euler"}
            return SGHMC(learning_rate=1e-3, preconditioner=None, **settings)
        if work == "logistic":
            settings = {"friction": 0.1, "noise_estimate": None, "integrator": "euler"}
            return SGHMC(batch_size=500, **BY_HAND, **settings)
        if work == "sgld":
            return SGLD(batch_size=500, **BY_HAND)
        return SGHMC(batch_size=500, n_steps=1 if work == "python" else 10)


def serve(work):
    """Make as many draws as standard input asks for, and say how long they took."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import pymc_sghmc

    model = model_of(work)
    step, point = step_of(work, model), model.initial_point()
    if hasattr(step, "setup_chain"):
        step.setup_chain(np.random.default_rng(1), 10**6, 0)
    for _ in range(400):
        point, _ = step.step(point)
    if work != "tuning":
        step.stop_tuning()
    point, _ = step.step(point)
    print(pymc_sghmc.__file__, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        for _ in range(int(line)):
            point, [stats] = step.step(point)
        assert not stats["diverging"]
        print(time.process_time() - start, flush=True)


class Checkout:
    """A process that makes draws with the package of one folder."""

    def __init__(self, folder, work):
        places = {"PYTHONPATH": str(folder)} | ONE_THREAD
        # each keeps what it compiled for itself
        places["PYTENSOR_FLAGS"] = f"base_compiledir={tempfile.gettempdir()}/{folder.name}.compiled"
        command = [sys.executable, __file__, "--serve", work, "."]
        self.process = subprocess.Popen(
            command, env=os.environ | places, text=True, stdin=subprocess.PIPE, stdout=-1
        )
        file = Path(self.process.stdout.readline().strip())
        assert file.is_relative_to(folder), f"{file} isn't in {folder}"

    def __call__(self, n):
        print(n, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline()) / n * 1e6


def compare(before, after, work, turns):
    pair = [Checkout(folder, work) for folder in (before, after)]
    n = max(1, round(50_000 / max(checkout(20) for checkout in pair)))
    orders = ((0, 1), (1, 0))  # who goes first changes
    times = np.empty((turns, 2))
    for turn in range(turns):
        for which in orders[turn % 2]:
            times[turn, which] = pair[which](n)
    for checkout in pair:
        checkout.process.stdin.close()
    ratios = times[:, 1] / times[:, 0]
    spread = np.subtract(*np.percentile(ratios, [75, 25])) / 1.35
    before, after = np.median(times, axis=0)
    error = 1.25 * spread / np.sqrt(turns)
    return {"before": before, "after": after, "ratio": np.median(ratios), "error": error}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    import report

    machine, results = report.machine(), {}
    for work in args.work:
        results[work] = compare(args.before.resolve(), args.after.resolve(), work, args.turns)
        report.progress(work, results[work])
    closing = report.closing(machine, "numpy", "pymc", "pytensor", "numba")
    report.print_json({"benchmark": "checkouts", "unit": "µs per draw", **results, **closing})
    return None


if __name__ == "__main__":
    main()
