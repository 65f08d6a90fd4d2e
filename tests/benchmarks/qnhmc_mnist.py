"""Table 2 of the QNHMC paper: MNIST's 7 against 9, logistic regression of 785 unknowns.

    python tests/benchmarks/qnhmc_mnist.py [--name "QNHMC(memory=7)" NUTS] [--draws 500] [--tune 1000]
        [--chains 2] [--slow-draws 150] [--slow-tune 150] [--seed 1] [--markdown]

All 12,214 training digits, pixels/255, normal priors (tests/model_collection/real.py); the reference is NUTS's.
Rows: QNHMC with its defaults, whose C is dense, and with 7 pairs; the paper's setting (7 pairs, 5
steps of .1, M = I, adapting for ever), and the same with a step that the first trajectories survive;
PyMC's HMC and NUTS and nutpie, diagonal and low rank. A gradient takes 5 to 10 ms, so that the last
four have one chain of ``--slow-draws``, which is enough for effective draws per gradient but little
for errors, R-hat and the mass matrix; nutpie then tunes for ``--slow-tune`` draws as well.

Test error is that of the mean probability on the 2,037 test digits. Errors of means are in posterior
sds, the worst of 785; sds by the reference's, the smallest and the largest, and the mean ratio of
variances. Burn-in is the first draw at which the log-density has reached the median of the
reference's, the slowest chain's, tuning included, and the leapfrog steps until then. Effective sizes,
gradients and seconds are as in posteriordb_table.py; the gradients from which limited memory learns
its pairs, some hundred in all, aren't counted. Prints one line of JSON.
"""

import os

# One processor: BLAS threads would fight with other work on the machine.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import logging
import sys
import warnings

from functools import partial
from pathlib import Path

import numpy as np

from scipy.special import expit

sys.path.insert(0, str(Path(__file__).parents[1]))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import pymc as pm
    import report

    from model_collection import real as references
    from posteriordb_table import PACKAGES, Run, attempt, by_nutpie, by_step, efficiency, errors
    from untouched import data_folder, unconstrained

    from pymc_sghmc import QNHMC

PAPER = {"memory": 7, "n_steps": 5, "step_size": 0.1, "mass": "identity", "adapt": "always"}
OURS = {
    "QNHMC": partial(by_step, make_step=QNHMC),
    "QNHMC(memory=7)": partial(by_step, make_step=partial(QNHMC, memory=7)),
    "QNHMC as printed": partial(by_step, make_step=partial(QNHMC, **PAPER)),
    "QNHMC as printed, step size .003": partial(
        by_step, make_step=partial(QNHMC, **PAPER | {"step_size": 0.003})
    ),
}
SLOW = {
    "HMC": partial(by_step, make_step=pm.HamiltonianMC),
    "NUTS": by_step,
    "nutpie": partial(by_nutpie, low_rank=False),
    "nutpie, low rank": partial(by_nutpie, low_rank=True),
}


def test_digits(data):
    """Pixels/255 of the test set's 7s and 9s with a column of ones, and whether it is a 9."""
    images = references.idx_of(data / "mnist/t10k-images-idx3-ubyte.gz")
    digits = references.idx_of(data / "mnist/t10k-labels-idx1-ubyte.gz")
    ours = (digits == 7) | (digits == 9)
    X, y = images[ours].reshape(-1, 28 * 28) / 255, digits[ours] == 9
    assert (len(y), y.sum()) == (2037, 1009)
    return np.column_stack([np.ones(len(X)), X]), y


def error_rate(draws, test):
    X, y = test
    probability = np.mean([expit(X @ draw) for draw in draws.reshape(-1, X.shape[1])], axis=0)
    return np.mean((probability > 0.5) != y)


def load(data):
    """The reference, its draws, what `usual_log_density` says of them, and the test digits."""
    reference = references.mnist79(data)
    draws = references.arrays_of(data, "references/mnist79")["draws"]
    return reference, draws, usual_log_density(reference, draws), test_digits(data)


def usual_log_density(reference, draws):
    """The median over the reference's draws."""
    point = reference.model.initial_point()
    logp = reference.model.compile_logp()
    values = [logp(point | {"intercept": draw[0], "beta": draw[1:]}) for draw in draws[::10]]
    return float(np.median(values))


def burn_in(idata, level):
    """Draws until the log-density reaches ``level`` and gradients until then; None is never."""
    groups = idata["warmup_sample_stats"], idata["sample_stats"]
    word = "lp" if "lp" in groups[1] else "logp"  # nutpie's
    lp, steps = (
        np.concatenate([group[key].values for group in groups], 1) for key in (word, "n_steps")
    )
    reached = lp >= level
    if not reached.any(axis=1).all():
        return None
    chain = int(np.argmax(first := reached.argmax(axis=1)))
    return int(first[chain]) + 1, int(steps[chain, : first[chain] + 1].sum())


def measure(sampler, reference, level, test, **sample):
    run = attempt(sampler, reference.model, **sample)
    return measure_run(run, reference, level, test) if isinstance(run, Run) else run


def measure_run(run, reference, level, test, n_states=1):
    """What the table says of a run; a chain of states moved in turn is a chain for each of them."""
    draws, _ = unconstrained(run.idata, reference.model)
    d = draws.shape[-1]
    draws = draws[:, : draws.shape[1] // n_states * n_states].reshape(len(draws), -1, n_states, d)
    draws = draws.swapaxes(1, 2).reshape(-1, draws.shape[1], d)
    moments = reference.mean, reference.sd, reference.error, reference.sd_error
    return {
        "test_error": error_rate(draws, test),
        **errors(draws, *moments),
        "variance_ratio": np.mean((draws - draws.mean(axis=(0, 1))) ** 2 / reference.sd**2),
        "burn_in": burn_in(run.idata, level),
        **efficiency(run, draws),
    }


def markdown(result):
    titles = ["", "chains × (tuning + draws)", "test error", "worst mean error, sds", "sd ratios"]
    titles += ["mean ratio of variances", "max R-hat", "min bulk ESS", "per 1,000 gradients"]
    titles += ["per second after tuning", "per second with tuning", "burn-in, draws", "gradients"]
    titles += ["gradients a draw", "in tuning, all"]
    lines = []
    for name, row in result["runs"].items():
        if "failed" in row:
            lines.append([name, f"failed: {row['failed']}", *[""] * (len(titles) - 2)])
            continue
        chains, draws = row["draws"]
        lines.append(
            [
                name,
                f"{chains} × ({row['tune']:,} + {draws:,})",
                f"{row['test_error']:.4f}",
                row["mean_error"],
                "{:.2f} to {:.2f}".format(*row["sd_ratio"]),
                row["variance_ratio"],
                f"{row['r_hat']:.3f}",
                row["min_bulk"],
                1000 * row["bulk_per_gradient"],
                row["bulk_per_second"],
                row["bulk_per_total_second"],
                *(row["burn_in"] or ("never", None)),
                row["gradients"] / (chains * draws),
                row["tuning_gradients"],
            ]
        )
    return "\n\n".join(
        [
            report.markdown_table(titles, lines),
            f"Test error of the reference: {result['reference_test_error']:.4f}. Seed "
            f"{result['seed']}. {report.note(result)}",
        ]
    )


def main():
    names = [*OURS, *SLOW]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--name", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--tune", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--slow-draws", type=int, default=150, help=f"of {', '.join(SLOW)}")
    parser.add_argument("--slow-tune", type=int, default=150, help="of the same")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the table says what the samplers' warnings would
    logging.getLogger("pymc").setLevel(logging.CRITICAL)
    machine, data, runs = report.machine(), data_folder(), {}
    reference, reference_draws, level, test = load(data)
    for name in args.name:
        if name in OURS:
            sampler, tune = OURS[name], args.tune
            sample = dict(draws=args.draws, tune=tune, chains=args.chains)
        else:
            sampler, tune = SLOW[name], args.slow_tune
            sample = dict(draws=args.slow_draws, tune=tune, chains=1)
            if name.startswith("nutpie"):
                sample["nutpie_tune"] = tune
        row = measure(sampler, reference, level, test, seed=args.seed, **sample)
        runs[name] = row | {"tune": tune}
        report.progress(name, runs[name])
    result = {
        "benchmark": "qnhmc_mnist",
        "seed": args.seed,
        "log_density": level,
        "reference_test_error": error_rate(reference_draws, test),
        "runs": runs,
        **report.closing(machine, *PACKAGES),
    }
    report.print_json(result)
    if args.markdown:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
