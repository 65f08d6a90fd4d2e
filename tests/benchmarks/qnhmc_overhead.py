"""Cost of a leapfrog step of QNHMC above that of the compiled gradient, and its memory.

    python tests/benchmarks/qnhmc_overhead.py [--unknowns 5000] [--memory 10] [--milliseconds 1]
        [--repeats 41] [--markdown]

Logistic regressions with as many rows as make the gradient of 5,000 unknowns take a millisecond, and
1,000 rows for 10, 100 and 785 unknowns, whose C is dense. Steps are tuned, then frozen; draws of
each and calls of the bare compiled gradient at positions of the chain alternate within one run, and
medians are compared, since machines are noisy. A draw's time, by its statistics, is divided by its
leapfrog steps. PyMC's HMC and NUTS compute one gradient more per draw than they count, which shows
where trajectories are short. The first row has 10 steps a draw, so that drawing the momentum and the
test, once per draw, weigh as in the paper; the others are with defaults.

Memory is the peak that tracemalloc sees, in a run of its own: 100 draws of tuning, two of them the
end of a window, and 20 frozen, in units of m d floats of eight bytes. Prints one line of JSON.
"""

import os

# One processor: BLAS threads would fight with other work on the machine.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import logging
import sys
import time
import tracemalloc
import warnings

from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import pymc as pm
    import report

    from model_collection.real import logistic_model
    from posteriordb_table import PACKAGES

    from pymc_sghmc import QNHMC

ROWS = 1000
SMALL = 10, 100, 785
TUNE = 200
CALLS = 20  # of the gradient in a repeat, and leapfrog steps of a chain at least
STEPS = {"QNHMC": QNHMC, "HMC (PyMC)": pm.HamiltonianMC, "NUTS (PyMC)": pm.NUTS}


def model_of(n_rows, d, seed=0):
    """Logistic regression on standard normal predictors, N(0, 1) priors, d unknowns."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n_rows, d - 1))
    beta = rng.standard_normal(d - 1) / d**0.5
    y = rng.binomial(1, 1 / (1 + np.exp(-X @ beta)))
    return logistic_model(X, y, (np.zeros(d), np.ones(d)))


class Chain:
    """A step and the point where it is."""

    def __init__(self, model, make_step, **settings):
        with model:
            self.step = make_step(model=model, rng=np.random.default_rng(1), **settings)
        self.point = model.initial_point()
        self.names = [variable.name for variable in model.value_vars]

    def draw(self):
        self.point, [statistics] = self.step.step(self.point)
        return statistics

    def tune(self, draws):
        for _ in range(draws):
            self.draw()
        self.step.stop_tuning()

    def position(self):
        """That of a further draw."""
        self.draw()
        return np.concatenate([np.ravel(self.point[name]) for name in self.names])

    def microseconds(self):
        """Of a leapfrog step, over draws with `CALLS` steps or more."""
        steps, seconds = 0, 0.0
        while steps < CALLS:
            statistics = self.draw()
            steps += statistics["n_steps" if "n_steps" in statistics else "tree_size"]
            seconds += statistics["perf_counter_diff"]
        return seconds / steps * 1e6


def gradient_microseconds(gradient, positions):
    """Of a call, at ever other positions."""
    start = time.perf_counter()
    for i in range(CALLS):
        gradient(positions[i % len(positions)])
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(model, steps, repeats):
    """Microseconds of the bare gradient and of the leapfrog steps of ``steps``, name: chain."""
    bare = QNHMC(model=model).function
    positions = []
    for chain in steps.values():
        chain.tune(TUNE)
        positions += [chain.position() for _ in range(10)]
    times = {name: [] for name in ("gradient", *steps)}
    for _ in range(repeats):
        times["gradient"].append(gradient_microseconds(bare, positions))
        for name, chain in steps.items():
            times[name].append(chain.microseconds())
    row = {"gradient": np.median(times["gradient"])}
    for name in steps:
        # Repeat by repeat: what slows the machine slows neighbours alike.
        ratios = np.array(times[name]) / np.array(times["gradient"])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        row[name] = {
            "microseconds": np.median(times[name]),
            "ratio": middle,
            "quartiles": [low, high],
            "above_gradient": np.median(np.array(times[name]) - np.array(times["gradient"])),
        }
    return row


def rows_for(milliseconds, d):
    """Rows with which the gradient of d unknowns takes so long."""
    n = 100
    for _ in range(3):
        model = model_of(n, d)
        positions = np.random.default_rng(0).standard_normal((5, d)) / d**0.5
        function = QNHMC(model=model).function
        gradient_microseconds(function, positions)
        took = np.median([gradient_microseconds(function, positions) for _ in range(5)])
        n = max(10, round(n * 1000 * milliseconds / took))
    return n


def peak_memory(model, d, memory):
    """Peak bytes of tuning and of frozen draws, without model and compiled function."""
    chain = Chain(model, QNHMC, memory=memory, n_steps=10)
    chain.draw()
    chain.step.begin_chain(np.random.default_rng(1))
    tracemalloc.start()
    chain.tune(100)
    tuning = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    for _ in range(20):
        chain.draw()
    frozen = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    unit = 8 * (memory or d) * d
    return {"unit_bytes": unit, "peak_tuning": tuning / unit, "peak_frozen": frozen / unit}


def markdown(result):
    titles = ["unknowns, C", "gradient, µs"]
    titles += [f"{name}, µs a step" for name in STEPS] + [f"{name}, × gradient" for name in STEPS]
    lines = []
    for name, row in result["runs"].items():
        found = [row.get(step) for step in STEPS]
        times = [step and step["microseconds"] for step in found]
        ratios = [
            step and f"{step['ratio']:.2f} ({step['quartiles'][0]:.2f}–{step['quartiles'][1]:.2f})"
            for step in found
        ]
        lines.append([name, row["gradient"], *times, *ratios])
    memory = result["peak_memory"]
    return "\n\n".join(
        [
            report.markdown_table(titles, lines),
            f"Medians of {result['repeats']} repeats, quartiles in brackets. Peak memory of QNHMC("
            f"memory={result['memory']}) at d = {result['unknowns']:,}: {memory['peak_tuning']:.1f} "
            f"m d floats while tuning, {memory['peak_frozen']:.1f} frozen; one is "
            f"{memory['unit_bytes'] / 1e6:.2g} MB. {report.note(result)}",
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unknowns", type=int, default=5000)
    parser.add_argument("--memory", type=int, default=10, help="m of limited memory")
    parser.add_argument("--milliseconds", type=float, default=1.0, help="of its gradient")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.CRITICAL)
    machine, runs, d = report.machine(), {}, args.unknowns
    rows = rows_for(args.milliseconds, d)
    model = model_of(rows, d)
    title = f"{d:,}, {args.memory} pairs, 10 steps a draw, {rows} rows"
    steps = {"QNHMC": Chain(model, QNHMC, memory=args.memory, n_steps=10)}
    runs[title] = measure(model, steps, args.repeats)
    report.progress(title, runs[title])
    memory = peak_memory(model, d, args.memory)
    report.progress("peak memory", memory)
    for small in SMALL:
        model = model_of(ROWS, small)
        steps = {name: Chain(model, make_step) for name, make_step in STEPS.items()}
        title = f"{small}, dense, defaults, {ROWS:,} rows"
        runs[title] = measure(model, steps, args.repeats)
        report.progress(title, runs[title])
    result = {
        "benchmark": "qnhmc_overhead",
        "unit": "microseconds, medians",
        "unknowns": d,
        "memory": args.memory,
        "rows": rows,
        "repeats": args.repeats,
        "runs": runs,
        "peak_memory": memory,
        **report.closing(machine, *PACKAGES),
    }
    report.print_json(result)
    if args.markdown:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
