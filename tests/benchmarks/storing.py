"""What it costs to keep a run in a RunStore.

python tests/benchmarks/storing.py [--rows 100000] [--columns 50] [--draws 20000] [--repeats 5] [--cores 1]

prints one line of JSON: seconds of ``pm.sample`` without and with a store, in turns, of a logistic model with untouched
SGHMC, the median of their ratios, the seconds that the processes spent in writing, megabytes and files that were written, and by how much the
process's memory grew from a quarter of the run to its end.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import resource
import shutil
import tempfile
import time
import warnings

from pathlib import Path

import untouched  # noqa: F401

import numpy as np
import pymc as pm
import report

from pymc_sghmc import SGHMC, RunStore
from pymc_sghmc.runs.recorder import ChainRecorder


def model_of(rows, columns):
    """A logistic model."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns))
    y = rng.random(rows) < 1 / (1 + np.exp(-x @ rng.normal(size=columns) / 5))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=columns)
        pm.Bernoulli("y", logit_p=pm.Data("x", x) @ beta, observed=y.astype(np.int8))
    return model


def resident():
    """Megabytes of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main():
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    machine, spent, memory = report.machine(), [0.0], []
    written = ChainRecorder._write

    def timed(self, *own):
        began = time.perf_counter()
        written(self, *own)
        spent[0] += time.perf_counter() - began
        memory.append((self.n_recorded, resident()))

    ChainRecorder._write = timed

    def seconds(**options):
        began = time.perf_counter()
        pm.sample(
            args.draws, tune=500, chains=args.cores, cores=args.cores, step=step, progressbar=False,
            random_seed=1, compute_convergence_checks=False, return_inferencedata=False, **options,
        )  # fmt: skip
        return time.perf_counter() - began

    turns = []
    with model_of(args.rows, args.columns):
        step = SGHMC(batch_size=500)
        seconds()
        for _ in range(args.repeats):
            folder = tempfile.mkdtemp()
            turns.append((seconds(), seconds(trace=RunStore(folder))))
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files) / 2**20
            shutil.rmtree(folder)
    without, stored = np.array(turns).T
    last = [mb for made, mb in memory if made > args.draws / 4]
    row = {
        "without": without.tolist(), "stored": stored.tolist(),
        "ratio": float(np.median(stored / without)),
        "writing, of the time": spent[0] / stored.sum(), "MB": size, "files": len(files),
        "memory grew by": last[-1] - last[-len(last) // args.repeats] if last else None,
    }  # fmt: skip
    packages = "numpy", "pymc", "pytensor", "numba", "pymc-sghmc"
    report.print_json({"benchmark": "storing", "rows": row, **report.closing(machine, *packages)})


if __name__ == "__main__":
    main()
