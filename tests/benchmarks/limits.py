"""What an inner step costs, beside loops written by hand, compiled gradients and other packages.

    python tests/benchmarks/limits.py [--work logistic double_well] [--repeats 7] [--markdown] [--quick]
        [--rows 10000 100000 1000000] [--folder DIR]

Microseconds per inner step in double precision, each with rows drawn afresh, uniformly and with
replacement; medians of repeats in which the contenders take turns, and ``ratio``, the median over
these turns of ours by the limit's. Works:

    logistic                    100,000 rows of 50 predictors, batches of 500
    logistic_control_variates   the same with control variates, what rows add at the centre in cache
    neural_network              784-100-10, sigmoids and softmax, 60,000 rows, batches of 500
    matrix_factorisation        200,000 unknowns, a million ratings, batches of 4,000
    double_well                 U = x⁴ − 2x², no data
    cores                       inner steps per second of ``pm.sample``: four chains on four cores
                                against one on one, logistic
    rows                        logistic of 20 predictors in single precision, 10⁴ to 10⁸ rows of a
                                memory-mapped file

Contenders: "limit", by hand in Numba, one call for many steps, and "numpy", by hand (both in
limits_loops.py); "gradient", PyTensor's compiled function called in a bare loop at one point on
rows drawn beforehand: no rows drawn, no noise, no update; "ours",
``step.step(point)`` of SGHMC with settings by hand, eq. 15 of the paper; the last two in PyTensor's
default mode and, where that is another, in mode NUMBA. Other packages are in limits_peers.py; those
that aren't installed are named under ``skipped``, those that refuse under ``failed``. All are told
to use one thread; ``processor_medians`` are microseconds of processor time, more than the clock's
where a package used several threads, less where others used the machine.

"cores" counts the draws between the last chain's first and the first chain's last, by the times at
which PyMC hands them out, so that neither compilation nor start count; ``scaling`` is four chains'
steps by four times those of one. Its "limit" is as many processes with the loop by hand: what the
machine itself can do. "rows" has one file, of which smaller works take the first rows; a block of a
million random rows repeats in it. It needs 80 bytes of disk per row, and as much memory for the
page cache; the file is gone through once beforehand, so that its pages are mapped. ``private_gb``
is this process's own memory, without the file.

MNIST comes from ``mnist/`` in the folder named by PYMC_SGHMC_DATA, ../shared/data by default; there
are random numbers in its place where it is missing. Each work runs in a process of its own and
prints one line of JSON; ``--markdown`` prints a table as well, ``--quick`` is a rehearsal.
"""

import os

os.environ.update(
    dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    )
)
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import argparse
import itertools
import json
import logging
import multiprocessing
import subprocess
import sys
import tempfile
import time
import warnings

from collections import defaultdict
from pathlib import Path

import limits_loops as loops
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import limits_peers as peers
    import pymc as pm
    import pytensor
    import report

    from pytensor.compile.mode import get_default_mode
    from pytensor.link.numba.linker import NumbaLinker

    from pymc_sghmc import SGHMC

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "numpy",
    "pymc",
    "pytensor",
    "numba",
    "llvmlite",
    "pymc-sghmc",
    "blackjax",
    "sgmcmcjax",
    "posteriors",
    "numpyro",
    "nutpie",
    "jax",
    "torch",
]
BATCH = 500
EULER = {"friction": 0.1, "noise_estimate": None, "integrator": "euler", "gradient": "plain"}
CHUNK = 1_000_000  # rows of the file written at once


# --- Contenders: functions that make some inner steps and return how many -------------------------


def by_hand(loop, start, data, eta, steps):
    """A loop of limits_loops."""
    theta, v, state = start.copy(), np.zeros_like(start), np.array([1], dtype=np.uint64)

    def block():
        loop(steps, theta, v, *data, eta, EULER["friction"], state)
        assert np.isfinite(theta).all()
        return steps

    return block


def in_numpy(gradient, start, eta, steps):
    theta, v, rng = start.copy(), np.zeros_like(start), np.random.default_rng(1)

    def block():
        loops.moved(steps, theta, v, gradient, eta, EULER["friction"], rng)
        assert np.isfinite(theta).all()
        return steps

    return block


def modes():
    """PyTensor modes by how they are called in names: its default, and NUMBA where that is another."""
    numba = isinstance(get_default_mode().linker, NumbaLinker)
    return {"": None} if numba else {"": None, " NUMBA": "NUMBA"}


def ours(model, point, **settings):
    """SGHMC's step, and the gradient that it compiled, called in a bare loop."""
    blocks = {}
    for mode, keyword in modes().items():
        with model:
            step = SGHMC(compile_kwargs={"mode": keyword} if keyword else None, **EULER | settings)
        step.stop_tuning()
        blocks[f"ours{mode}"] = drawing(step, point)
        blocks[f"gradient{mode}"] = bare_gradient(step, point)
    return dict(sorted(blocks.items()))


def drawing(step, point):
    state = {"point": {name: np.asarray(value, dtype=float) for name, value in point.items()}}

    def block():
        state["point"], [stats] = step.step(state["point"])
        assert not stats["diverging"]
        return step.settings["n_steps"]

    block()  # what a chain sets up
    return block


def bare_gradient(step, point):
    gradient = step.tuner.target(step.chain.tuning).gradient
    rng, position = np.random.default_rng(1), step.unknowns.ravel(point)
    function = gradient.density.function
    minibatches = [gradient.order.probe(rng) for _ in range(200)]
    others = itertools.cycle([calls(gradient, position, rows) for rows in minibatches])

    def block():
        for _ in range(10):
            for arguments in next(others):
                function(*arguments)
        return 10

    return block


def calls(gradient, position, minibatch):
    """Arguments with which a gradient calls the compiled density: control variates do it twice."""
    density = gradient.density
    function, recorded = density.function, []
    density.function = lambda *args: recorded.append(args) or function(*args)
    gradient(position, minibatch)
    density.function = function
    return recorded


# --- Measurement ----------------------------------------------------------------------------------


def microseconds(blocks, repeats, seconds):
    """Wall time and processor time per step of each repeat, contenders in turn."""
    wall, processor = defaultdict(list), defaultdict(list)
    for block in blocks.values():
        block()  # compilation
    for _ in range(repeats):
        for name, block in blocks.items():
            steps, start, used = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - start < seconds:
                steps += block()
            wall[name].append((time.perf_counter() - start) / steps * 1e6)
            processor[name].append((time.process_time() - used) / steps * 1e6)
    return wall, processor


def medians(times):
    return {name: float(np.median(values)) for name, values in times.items()}


def ratio(times, name, other):
    return float(np.median(np.divide(times[name], times[other])))


def compared(blocks, others, args, **facts):
    """A row: the contenders ``blocks``, and those that the functions ``others`` make."""
    skipped, failed, blocks = {}, {}, dict(blocks)
    for name, make in others.items():
        try:
            block = make()
            block()
            blocks[name] = block
        except ImportError as error:
            skipped[name] = str(error).split(" (")[0]
        except Exception as error:  # A package that refuses is named with what it said.
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    wall, processor = microseconds(blocks, args.repeats, args.seconds)
    result = {
        "unit": "microseconds per inner step, medians",
        "medians": medians(wall),
        "ratio": ratio(wall, "ours", "limit"),
        "ratio_to_gradient": ratio(wall, "ours", "gradient"),
    }
    if "ours NUMBA" in wall:
        result["ratio_numba"] = ratio(wall, "ours NUMBA", "limit")
        result["ratio_to_gradient_numba"] = ratio(wall, "ours NUMBA", "gradient NUMBA")
    result["processor_medians"] = medians(processor)
    result["processor_ratio"] = ratio(processor, "ours", "limit")
    return result | facts | {"skipped": skipped, "failed": failed}


# --- Works ----------------------------------------------------------------------------------------


def logistic_rows(n_rows, d, dtype=float, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n_rows, d), dtype=dtype)
    beta = rng.standard_normal(d) / d**0.5
    return X, (rng.random(n_rows) < 1 / (1 + np.exp(-(X @ beta)))).astype(np.int8), beta


def logistic_model(X, y):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=X.shape[1])
        pm.Bernoulli("y", logit_p=pm.math.dot(pm.Data("X", X), beta), observed=y)
    return model


def posterior_mode(X, y):
    """By Newton's method."""
    beta = np.zeros(X.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-(X @ beta)))
        curvature = (X * (p * (1 - p))[:, None]).T @ X + np.eye(beta.size)
        beta = beta + np.linalg.solve(curvature, X.T @ (y - p) - beta)
    return beta


def logistic(args):
    X, y, _ = logistic_rows(100_000, 50)
    mode, eta, steps = posterior_mode(X, y), 1e-6, 100
    data = X, y, np.zeros(50), BATCH
    blocks = {
        "limit": by_hand(loops.logistic, mode, data, eta, steps),
        "numpy": in_numpy(loops.logistic_numpy(*data), mode, eta, steps),
        **ours(
            logistic_model(X, y), {"beta": mode}, batch_size=BATCH, learning_rate=eta, n_steps=steps
        ),
    }
    others = peers.of("logistic", mode, (X, y), BATCH, eta)
    others["nutpie (all rows)"] = lambda: peers.nutpie(logistic_model(X, y))
    return compared(blocks, others, args, rows=len(X), unknowns=50, batch_size=BATCH)


def logistic_control_variates(args):
    X, y, _ = logistic_rows(100_000, 50)
    mode, eta, steps = posterior_mode(X, y), 1e-6, 100
    probability = 1 / (1 + np.exp(-(X @ mode)))
    data = X, probability, X.T @ (y - probability), BATCH
    model = logistic_model(X, y)
    settings = {"gradient": "control_variates", "centre": {"beta": mode}, "n_steps": steps}
    blocks = {
        "limit": by_hand(loops.logistic, mode, data, eta, steps),
        "numpy": in_numpy(loops.logistic_numpy(*data), mode, eta, steps),
        **ours(model, {"beta": mode}, batch_size=BATCH, learning_rate=eta, **settings),
    }
    others = peers.of("logistic_control_variates", mode, (X, y), BATCH, eta)
    return compared(blocks, others, args, rows=len(X), unknowns=50, batch_size=BATCH)


def images():
    """Pixels between 0 and 1 and digits: MNIST's, or random numbers."""
    folder = Path(os.environ.get("PYMC_SGHMC_DATA", ROOT / "../shared/data")) / "mnist"
    if folder.is_dir():
        sys.path.insert(0, str(ROOT / "tests"))
        from model_collection import real as references

        pixels, digits = (
            references.idx_of(folder / f"train-{name}-ubyte.gz")
            for name in ("images-idx3", "labels-idx1")
        )
        return pixels.reshape(len(pixels), -1) / 255, digits.astype(np.int64), "MNIST"
    rng = np.random.default_rng(0)
    X = rng.random((60_000, 784)) * (rng.random((60_000, 784)) < 0.2)
    return X, np.argmax(X @ rng.standard_normal((784, 10)), axis=1), "random"


def neural_network(args):
    X, y, source = images()
    sizes = p, h, k = X.shape[1], 100, 10
    with pm.Model() as model:
        W = pm.Normal("W", 0, 1, shape=(p, h))
        b = pm.Normal("b", 0, 1, shape=h)
        W2 = pm.Normal("W2", 0, 1, shape=(h, k))
        b2 = pm.Normal("b2", 0, 1, shape=k)
        hidden = pm.math.sigmoid(pm.math.dot(pm.Data("X", X), W) + b)
        pm.Categorical("y", logit_p=pm.math.dot(hidden, W2) + b2, observed=y)
    rng = np.random.default_rng(1)
    point = {
        name: 0.1 * rng.standard_normal(value.shape)
        for name, value in model.initial_point().items()
    }
    start = np.concatenate([np.ravel(point[name]) for name in ("W", "b", "W2", "b2")])
    eta, steps, data = 1e-7, 50, (X, y, sizes, BATCH)
    blocks = {
        "limit": by_hand(loops.neural_network, start, data, eta, steps),
        "numpy": in_numpy(loops.neural_network_numpy(*data), start, eta, steps),
        **ours(model, point, batch_size=BATCH, learning_rate=eta, n_steps=steps),
    }
    others = peers.of("neural_network", start, (X, y), BATCH, eta, sizes)
    facts = {"rows": len(X), "unknowns": start.size, "batch_size": BATCH, "data": source}
    return compared(blocks, others, args, **facts)


def matrix_factorisation(args):
    n_rows, batch, counts = 1_000_000, 4000, (6000, 4000, 20)
    n_users, n_items, rank = counts
    rng = np.random.default_rng(0)
    users, items = rng.integers(n_users, size=n_rows), rng.integers(n_items, size=n_rows)
    U, V = (0.5 * rng.standard_normal((n, rank)) for n in (n_users, n_items))
    y = np.einsum("ij,ij->i", U[users], V[items]) + rng.standard_normal(n_rows)
    with pm.Model() as model:
        user, item = (
            pm.Normal(name, 0, 1, shape=(n, rank))
            for name, n in (("users", n_users), ("items", n_items))
        )
        row, column = pm.Data("row", users), pm.Data("column", items)
        pm.Normal("y", (user[row] * item[column]).sum(axis=1), 1, observed=y)
    start = np.concatenate([U.ravel(), V.ravel()])
    eta, steps, data = 1e-5, 50, (users, items, y, counts, batch)
    point = {"users": U, "items": V}
    blocks = {
        "limit": by_hand(loops.matrix_factorisation, start, data, eta, steps),
        "numpy": in_numpy(loops.matrix_factorisation_numpy(*data), start, eta, steps),
        **ours(model, point, batch_size=batch, learning_rate=eta, n_steps=steps),
    }
    pairs = np.column_stack([users, items])
    others = peers.of("matrix_factorisation", start, (pairs, y), batch, eta, counts)
    return compared(blocks, others, args, rows=n_rows, unknowns=start.size, batch_size=batch)


def double_well(args):
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("energy", 2 * x**2 - x**4)
    start, eta, steps = np.array([0.5]), 1e-3, 10_000
    blocks = {
        "limit": by_hand(loops.double_well, start, (), eta, steps),
        "numpy": in_numpy(loops.double_well_numpy(), start, eta, 1000),
        **ours(model, {"x": np.array(0.5)}, learning_rate=eta, n_steps=steps),
    }
    others = peers.of("double_well", start, None, None, eta)
    return compared(blocks, others, args, unknowns=1)


# --- Chains beside each other ---------------------------------------------------------------------


def cores(args):
    X, y, _ = logistic_rows(100_000, 50)
    mode, eta = posterior_mode(X, y), 1e-6
    with logistic_model(X, y) as model:
        step = SGHMC(batch_size=BATCH, learning_rate=eta, n_steps=100, **EULER)
    loop = by_hand(loops.logistic, mode, (X, y, np.zeros(50), BATCH), eta, 100)
    loop()
    draws = 100 if args.quick else 1000
    rates = defaultdict(list)
    for _ in range(min(args.repeats, 5)):
        for n in (1, 4):
            rates[f"ours, {n}"].append(sampling_rate(model, step, {"beta": mode}, n, draws))
            rates[f"limit, {n}"].append(loop_rate(loop, n, 4 * args.seconds))
    scaling = {name: ratio(rates, f"{name}, 4", f"{name}, 1") / 4 for name in ("ours", "limit")}
    return {
        "unit": "inner steps per second of all chains, medians",
        "medians": medians(rates),
        "ratio": scaling["ours"],
        "scaling": scaling,
        "rows": len(X),
        "unknowns": 50,
        "batch_size": BATCH,
    }


def sampling_rate(model, step, point, n_chains, draws):
    """Inner steps per second while all chains sample."""
    times = defaultdict(list)
    with model:
        pm.sample(
            draws,
            tune=10,
            chains=n_chains,
            cores=n_chains,
            step=step,
            initvals=point,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
            callback=lambda trace, draw: times[draw.chain].append(time.perf_counter()),
        )
    begin = max(chain[0] for chain in times.values())
    end = min(chain[-1] for chain in times.values())
    count = sum(begin < when <= end for chain in times.values() for when in chain)
    return count * step.settings["n_steps"] / (end - begin)


def loop_rate(loop, n_processes, seconds):
    """Steps per second of as many processes."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def run():
        steps, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            steps += loop()
        queue.put(steps / spent)

    processes = [context.Process(target=run) for _ in range(n_processes)]
    for process in processes:
        process.start()
    total = sum(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return total


# --- Rows -----------------------------------------------------------------------------------------


def rows(args):
    counts, d = sorted(args.rows), 20
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        X, y, beta = rows_of_file(Path(folder) / "X", counts[-1], d)
        blocks = {}
        for n in counts:
            model = shared_logistic_model(X[:n], y[:n])
            settings = {"batch_size": BATCH, "learning_rate": 0.01 / n, "n_steps": 100}
            made = ours(model, {"beta": beta}, **settings)
            blocks |= {
                f"{name}, {n}": block for name, block in made.items() if name.startswith("ours")
            }
            data = np.asarray(X[:n]), y[:n], np.zeros(d), BATCH
            blocks[f"limit, {n}"] = by_hand(loops.logistic, beta, data, 0.01 / n, 100)
        times, _ = microseconds(blocks, args.repeats, args.seconds)
        private = private_gb()
        del blocks, X
    return {
        "unit": "microseconds per inner step, medians",
        "medians": medians(times),
        "ratio": {str(n): ratio(times, f"ours, {n}", f"limit, {n}") for n in counts},
        "growth": {
            name: ratio(times, f"{name}, {counts[-1]}", f"{name}, {counts[0]}")
            for name in ("ours", "limit")
        },
        "unknowns": d,
        "batch_size": BATCH,
        "private_gb": private,
    }


def rows_of_file(path, n_rows, d):
    """X as a memory map of a new file, outcomes, and the coefficients that made them."""
    chunk, outcomes, beta = logistic_rows(min(n_rows, CHUNK), d, np.float32)
    with path.open("wb") as file:
        for start in range(0, n_rows, CHUNK):
            chunk[: n_rows - start].tofile(file)
    X = np.memmap(path, dtype=np.float32, mode="r", shape=(n_rows, d))
    for start in range(0, n_rows, CHUNK):
        X[start : start + CHUNK, 0].sum()
    return X, np.resize(outcomes, n_rows), beta


def shared_logistic_model(X, y):
    # pm.Data would copy the map, and in double precision
    shared = pytensor.shared(np.zeros((1, X.shape[1]), X.dtype), name="X", shape=(None, X.shape[1]))
    shared.set_value(X, borrow=True)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=X.shape[1])
        pm.Bernoulli("y", logit_p=pm.math.dot(shared, beta), observed=y)
    return model


def private_gb():
    """This process's own memory, without files; None where the system doesn't tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    [line] = [line for line in status.read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024 / 1e9


# --- Command line ---------------------------------------------------------------------------------

WORKS = {
    function.__name__: function
    for function in (
        logistic,
        logistic_control_variates,
        neural_network,
        matrix_factorisation,
        double_well,
        cores,
        rows,
    )
}


def markdown(results):
    """A table of works and contenders; then those of cores and rows."""
    tables, table = [], {}
    for work, result in results.items():
        if "medians" not in result:
            tables.append(f"{work}: {result['failed']}")
        elif work in ("cores", "rows"):
            lines = [[name, float(value)] for name, value in result["medians"].items()]
            tables.append(report.markdown_table([work, result["unit"]], lines))
        else:
            table[work] = result["medians"] | {"ours / limit": result["ratio"]}
    names = list(dict.fromkeys(name for medians in table.values() for name in medians))
    names.sort(key="ours / limit".__eq__)
    if table:
        lines = [[work, *map(medians.get, names)] for work, medians in table.items()]
        tables.insert(0, report.markdown_table(["µs per inner step", *names], lines))
    noted = [result for result in results.values() if "versions" in result]
    return "\n\n".join(tables + [report.note(result) for result in noted[:1]])


def run(work, argv):
    """Result of a work, in a process of its own."""
    command = [sys.executable, __file__, *argv, "--worker", work]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"benchmark": "limits", "work": work, "failed": f"exit status {done.returncode}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a contender in each repeat")
    parser.add_argument("--rows", type=int, nargs="+", default=[10**k for k in range(4, 9)])
    parser.add_argument("--folder", help="for the file of rows; default: the temporary folder")
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    parser.add_argument("--quick", action="store_true", help="few repeats and at most 10^6 rows")
    parser.add_argument("--worker", choices=WORKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.seconds = min(args.repeats, 2), min(args.seconds, 0.1)
        args.rows = [n for n in args.rows if n <= 1_000_000]
    if args.worker:
        warnings.simplefilter("ignore")
        logging.getLogger("pymc").setLevel(logging.ERROR)
        machine = report.machine()
        result = {"benchmark": "limits", "work": args.worker, **WORKS[args.worker](args)}
        linker = type(get_default_mode().linker).__name__
        report.print_json(result | {"default_linker": linker, **report.closing(machine, *PACKAGES)})
        sys.stdout.flush()
        os._exit(0)  # threads of other packages are in no hurry
    results = {}
    for work in args.work:
        results[work] = run(work, sys.argv[1:])
        print(json.dumps(results[work]), flush=True)
    if args.markdown:
        print(f"\n{markdown(results)}")


if __name__ == "__main__":
    main()
