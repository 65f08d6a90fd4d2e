"""What an inner step costs when the data don't fit: files larger than memory, in several ways.

    python tests/benchmarks/streams.py [--gigabytes 4] [--seconds 20] [--folder DIR]
        [--ways memory arrays epochs loader parquet] [--warm] [--markdown]

Logistic regression of 50 predictors in single precision, batches of 500, one chain of SGHMC with
plain minibatches and settings by hand, ``step.step(point)`` of 100 inner steps, for --seconds. Ways:

    memory     the file's first 100,000 rows in memory, ``replace=True``
    arrays     ``data={"X": np.memmap, ...}``, rows drawn at random from all of the file
    epochs     the same with ``replace=False``
    loader     ``data=ArrayLoader(...)``, contiguous blocks of 1 MB in random order
    parquet    ``data=ParquetLoader(...)``, row groups of 65,536 rows in random order
    one_pass   ``ArrayLoader``: seconds for the gradient of all rows

Each way runs in a process of its own, on files of which the page cache holds nothing, unless
``--warm`` reads them beforehand. ``private_mb`` is the process's own memory at its peak, without
the pages of the files, above what it had before the step was made. Files are of --gigabytes each
in the folder (a temporary one by default) and deleted at the end. Larger than memory is larger than
what ``free`` calls available. Prints one line of JSON.
"""

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import warnings

from pathlib import Path

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import pymc as pm
    import report

    from pymc_sghmc import SGHMC
    from pymc_sghmc.loaders import ArrayLoader, ParquetLoader

D, BATCH, CHUNK, M = 50, 500, 65_536, 100
WAYS = ["memory", "arrays", "epochs", "loader", "parquet", "one_pass"]
BY_HAND = {"gradient": "plain", "friction": 0.1, "noise_estimate": None, "preconditioner": None}
PACKAGES = ("numpy", "pymc", "pytensor", "pymc-sghmc", "pyarrow")


def write(folder, n_rows, parquet):
    """Write X and y to raw files and, on request, the same rows to a Parquet file."""
    rng = np.random.default_rng(0)
    beta = (rng.standard_normal(D) / D**0.5).astype("f4")
    X = np.memmap(folder / "X.f4", "f4", "w+", shape=(n_rows, D))
    y = np.memmap(folder / "y.i1", "i1", "w+", shape=n_rows)
    writer = None
    for start in range(0, n_rows, CHUNK):
        rows = slice(start, min(start + CHUNK, n_rows))
        X[rows] = rng.standard_normal((rows.stop - start, D), dtype="f4")
        y[rows] = rng.random(rows.stop - start) < 1 / (1 + np.exp(-X[rows] @ beta))
        if parquet:
            import pyarrow as pa
            import pyarrow.parquet as pq

            columns = {f"x{i}": X[rows, i] for i in range(D)} | {"y": y[rows]}
            table = pa.table(columns)
            if writer is None:
                writer = pq.ParquetWriter(folder / "rows.parquet", table.schema, compression="none")
            writer.write_table(table)
    if writer is not None:
        writer.close()
    X.flush(), y.flush()


def drop_cache(folder, warm):
    """Have the page cache hold nothing, or all, of the files."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while warm and file.read(2**24):
                pass


def private_mb():
    """Memory of this process alone."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return int(line.split()[1]) / 1024


def peak_of(block):
    """Call and return the most private memory meanwhile, looking every 10 ms."""
    peak, stop = [private_mb()], threading.Event()

    def watch():
        while not stop.wait(0.01):
            peak[0] = max(peak[0], private_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = block()
    finally:
        stop.set()
        thread.join()
    return result, peak[0]


def run(way, folder, n_rows, seconds):
    """One way in this process."""
    X = np.memmap(folder / "X.f4", "f4", "r", shape=(n_rows, D))
    y = np.memmap(folder / "y.i1", "i1", "r", shape=n_rows)
    arrays = {"X": X, "y": y}
    if way == "memory":
        arrays = {name: np.array(array[:100_000]) for name, array in arrays.items()}
    data = arrays
    if way in ("loader", "one_pass"):
        data = ArrayLoader(arrays)
    if way == "parquet":
        columns = {"X": [f"x{i}" for i in range(D)], "y": "y"}
        data = ParquetLoader(folder / "rows.parquet", columns)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=D)
        logit = pm.Data("X", X[:10]) @ beta
        pm.Bernoulli("likelihood", logit_p=logit, observed=pm.Data("y", y[:10]))
        before = private_mb()

        def work():
            step = SGHMC(
                batch_size=BATCH,
                data=data,
                replace=way != "epochs",
                learning_rate=0.01 / n_rows,
                n_steps=M,
                **BY_HAND,
            )
            if way == "one_pass":
                began = time.perf_counter()
                step.tuner.gradient.passes.likelihood(step.tuner.initial)
                return {"seconds": time.perf_counter() - began}
            step.begin_chain(np.random.default_rng(1))
            point, _ = step.step(model.initial_point())
            began, steps, elapsed = time.perf_counter(), 0, 0.0
            while elapsed < seconds:
                point, _ = step.step(point)
                steps, elapsed = steps + M, time.perf_counter() - began
            return {"us_per_step": elapsed / steps * 1e6, "steps": steps}

        row, peak = peak_of(work)
    return row | {"private_mb": peak - before}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # way and rows, in a process
    options = parser.parse_args()
    if options.one:
        way, n_rows = options.one
        report.print_json(run(way, options.folder, int(n_rows), options.seconds))
        return
    machine, rows = report.machine(), {}
    n_rows = int(options.gigabytes * 1e9 / (4 * D))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write(Path(folder), n_rows, "parquet" in options.ways)
        for way in options.ways:
            drop_cache(Path(folder), options.warm)
            command = [sys.executable, __file__, "--one", way, str(n_rows)]
            command += ["--folder", folder, "--seconds", str(options.seconds)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows[way] = json.loads(output.splitlines()[-1])
            report.progress(way, rows[way])
    result = {"benchmark": "streams", "gigabytes": options.gigabytes, "n_rows": n_rows}
    result |= {"warm": options.warm, "rows": rows, **report.closing(machine, *PACKAGES)}
    report.print_json(result)
    if options.markdown:
        names = ["us_per_step", "seconds", "private_mb"]
        cells = [[way, *(row.get(name) for name in names)] for way, row in rows.items()]
        print(report.markdown_table(["", *names], cells))
        print(report.note(result))


if __name__ == "__main__":
    main()
