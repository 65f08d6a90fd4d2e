"""Passes over Dask's partitions on a cluster of one and of two workers, and what comes home.

    python tests/benchmarks/cluster.py [--rows 2e6] [--partitions 16] [--repeats 3] [--markdown]

Logistic regression of 20 predictors in single precision, drawn on the workers, where they persist.
For each number of workers, each with one thread: seconds of making ``SGHMC(data=...)`` with a pool
of 100,000 rows, median over repeats; seconds of each pass, the first for rows at hand and the
largest for the pool; bytes of a task and of what it returns. The draws of all runs are compared bit by bit, also with those at home, in
threads, and with a worker killed in the third pass. Prints one line of JSON.
"""

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import argparse
import pickle
import signal
import threading
import time
import warnings

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import dask
    import dask.array as da
    import pymc as pm
    import report

    from distributed import Client, LocalCluster

    from pymc_sghmc import SGHMC
    from pymc_sghmc.loaders import DaskLoader

D, POOL = 20, 100_000
PACKAGES = ("numpy", "pymc", "pytensor", "pymc-sghmc", "dask", "distributed")


class Timed(DaskLoader):
    """Notes seconds and sizes of each pass, and kills a worker in one of them if asked."""

    def __init__(self, data, client=None, killed=None):
        super().__init__(data, client)
        self.passes = []
        self.killed = killed

    def map_sum(self, task):
        if len(self.passes) == self.killed:
            [victim, *_] = self.client.run(os.getpid).values()
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
        began = time.perf_counter()
        found = super().map_sum(task)
        seconds = time.perf_counter() - began
        self.passes.append((seconds, len(pickle.dumps(task)), len(pickle.dumps(found))))
        return found


def rows(block_info=None, beta=None):
    """Predictors and outcome of one partition, drawn by its number."""
    number = block_info[None]["chunk-location"][0]
    rng = np.random.default_rng([1, number])
    X = rng.standard_normal((block_info[None]["chunk-shape"][0], D + 1)).astype("f4")
    X[:, D] = rng.random(len(X)) < 1 / (1 + np.exp(-X[:, :D] @ beta))
    return X


def data_of(n_rows, n_partitions):
    """Lazy arrays."""
    beta = (np.random.default_rng(0).standard_normal(D) / D**0.5).astype("f4")
    chunks = tuple(map(len, np.array_split(np.arange(n_rows), n_partitions)))
    whole = da.map_blocks(rows, chunks=(chunks, (D + 1,)), dtype="f4", beta=beta)
    return {"X": whole[:, :D], "y": whole[:, D]}


def run(loader):
    """Seconds of making the step, and draws."""
    few = {name: np.asarray(values) for name, values in loader.head().items()}
    with pm.Model():
        beta = pm.Normal("beta", 0, 1, shape=D)
        logit = pm.Data("X", few["X"]) @ beta
        pm.Bernoulli("likelihood", logit_p=logit, observed=pm.Data("y", few["y"]))
        began = time.perf_counter()
        step = SGHMC(data=loader, pool=POOL)
        seconds = time.perf_counter() - began
        options = {"chains": 2, "cores": 1, "random_seed": 1, "progressbar": False}
        idata = pm.sample(100, tune=100, step=step, compute_convergence_checks=False, **options)
    return seconds, idata.posterior["beta"].values


def on_cluster(n_workers, n_rows, n_partitions, repeats):
    """Figures of a cluster, and all draws that were made on it."""
    options = {"n_workers": n_workers, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        data = {name: value.persist() for name, value in data_of(n_rows, n_partitions).items()}
        seconds, passes, draws = [], [], []
        for _ in range(repeats + 1):  # the first compiles
            loader = Timed(data, client)
            spent, values = run(loader)
            seconds.append(spent)
            passes.append([found[0] for found in loader.passes])
            draws.append(values)
        sizes = [found[1:] for found in loader.passes]
        if n_workers > 1:
            draws.append(run(Timed(data, client, killed=2))[1])
    row = {"setup_s": np.median(seconds[1:])}
    figures = zip(np.median(passes[1:], axis=0), sizes, strict=True)
    for number, (spent, (task, home)) in enumerate(figures, 1):
        row[f"pass {number}"] = {"s": spent, "task_bytes": task, "home_bytes": home}
    return row, draws


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=float, default=2e6)
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    n_rows = int(options.rows)
    machine = report.machine()
    by_workers, draws = {}, []
    for n_workers in (1, 2):
        figures, made = on_cluster(n_workers, n_rows, options.partitions, options.repeats)
        by_workers[f"{n_workers} workers"] = figures
        draws += made
        report.progress(f"{n_workers} workers", figures)
    with dask.config.set(scheduler="threads"):
        draws.append(run(Timed(data_of(n_rows, options.partitions)))[1])
    one, two = by_workers.values()
    passes = [name for name in one if name.startswith("pass")]
    result = {
        "benchmark": "cluster",
        "n_rows": n_rows,
        "partitions": options.partitions,
        "rows": by_workers,
        "speed-up": {name: one[name]["s"] / two[name]["s"] for name in passes},
        "draws_are_equal": all(np.array_equal(other, draws[0]) for other in draws),
    }
    result |= report.closing(machine, *PACKAGES)
    report.print_json(result)
    if options.markdown:
        cells = [
            [
                name,
                one[name]["s"],
                two[name]["s"],
                result["speed-up"][name],
                two[name]["task_bytes"],
                two[name]["home_bytes"],
            ]
            for name in passes
        ]
        titles = ["Pass", "1 worker, s", "2 workers, s", "Speed-up", "Bytes out", "Bytes home"]
        print(report.markdown_table(titles, cells))
        print(report.note(result))


if __name__ == "__main__":
    main()
