"""Table 3 of the QNHMC paper: matrix factorisation of MovieLens-1M by MAP and four HMC samplers.

    python examples/papers/qnhmc_table3.py [folder] [--method QNHMC ...] [--draws 200] [--burn-in 100]
        [--start mode] [--ratings ml-1m/ratings.dat] [--quick]

Fu, Luo & Zhang (2016), section 5.3: rank 10, step size .01, 10 leapfrog steps, gradients of all
ratings. A tenth of the ratings is held out; samplers start at small random factors, or at the mode,
as in the demo code that the paper refers to. Precisions are drawn by Gibbs steps between the draws;
HMC-BFGS, which moves several states in turn, samples their logarithms with the factors. One chain
each. A sampler that has finished isn't run again after a kill; its averages are in ``folder``/runs.
"""

import sys
import time

import common
import matplotlib.pyplot as plt
import movielens
import numpy as np
import pymc as pm

from hmc_bfgs import HMCBFGS
from movielens import NAMES
from report import markdown_table

from pymc_sghmc import QNHMC, GammaGibbs

PRECISIONS = [*(f"lam_{name}" for name in NAMES), "tau"]
FIXED = {"lam_U": 10.0, "lam_V": 10.0, "lam_a": 8.0, "lam_b": 3.0, "tau": 1.6}  # of MAP
STEP_SIZE, N_STEPS = 0.01, 10  # the paper's
PRINTED = {"step_size": STEP_SIZE, "n_steps": N_STEPS}


def hmc(factors, d):
    """HMC with unit masses."""
    return pm.HamiltonianMC(
        factors,
        path_length=N_STEPS * STEP_SIZE,
        step_scale=STEP_SIZE * d**0.25,  # PyMC divides it by d^¼
        adapt_step_size=False,
        scaling=np.ones(d),
        is_cov=True,
    )


def qnhmc_as_printed(factors, d):
    """Algorithm 2 with 7 pairs of limited memory, the accept line mended."""
    return QNHMC(factors, **PRINTED, memory=7, mass="identity", adapt="always")


METHODS = {
    "MAP": None,
    "HMC": hmc,
    "HMC-BFGS": None,
    "QNHMC as printed": qnhmc_as_printed,
    "QNHMC": lambda factors, d: QNHMC(factors),
}
PAPER = {
    "MAP": (".8701", "27.67"),
    "HMC": (".8607", "202.5"),
    "HMC-BFGS": (".8618", "179.23"),
    "QNHMC as printed": (".8628", "108.34"),
}


def begin(name, test, mean_rating, args):
    """Return the averages of a method's predictions: those that are there, or empty ones."""
    settings = {"method": name, "rank": args.rank, "seed": args.seed}
    if name != "MAP":
        settings |= {"draws": args.draws, "burn_in": args.burn_in}
    if args.ratings:
        settings["ratings"] = args.ratings
    path = args.folder / "runs" / f"{args.name}_{name.replace(' ', '_')}.npz"
    return common.Predictions(
        path,
        settings,
        movielens.predictor(test, mean_rating),
        lambda prediction: {"rmse": movielens.rmse(prediction, test)},
        chains=1,
        draws=1 if name == "MAP" else args.draws,
        burn_in=0 if name == "MAP" else args.burn_in,
        save_seconds=np.inf,  # what tuning has learnt isn't in the file
    )


def find_mode(train, test, sizes, args):
    """MAP with fixed precisions, by L-BFGS."""
    predictions = begin("MAP", test, train.rating.mean(), args)
    if not predictions.is_finished:
        print("MAP", flush=True)
        model = movielens.factorisation(train, *sizes, args.rank, FIXED)
        start = movielens.start(model, np.random.default_rng(args.seed))
        with model:
            mode = pm.find_MAP(start=start, maxeval=args.maxeval)
        predictions(None, common.Draw(0, 0, mode))
    return predictions


def run(name, mode, train, test, sizes, args):
    """Sample, unless it has been done."""
    predictions = begin(name, test, train.rating.mean(), args)
    if predictions.is_finished:
        return predictions
    print(name, flush=True)
    model = movielens.factorisation(train, *sizes, args.rank)
    with model:
        if name == "HMC-BFGS":
            steps = HMCBFGS(**PRINTED)
        else:
            d = (sizes[0] + sizes[1]) * (args.rank + 1)
            factors = METHODS[name]([model[name] for name in NAMES], d)
            steps = [factors, GammaGibbs([model[name] for name in PRECISIONS])]
    predictions.watch = lambda draw: {
        "seconds": time.monotonic() - predictions.begun,
        "accept": float(draw.stats[0]["accept"]),
        "gradients": int(draw.stats[0]["n_steps"]),
    }
    start = {name: mode[name] for name in NAMES} | FIXED
    if args.start == "random":
        start = movielens.start(model, np.random.default_rng(args.seed))
    common.sample(
        model,
        steps,
        predictions,
        initvals=[start],
        seed=args.seed,
        var_names=PRECISIONS,
        tune=args.burn_in,
        cores=1,
    )
    return predictions


def table(runs, args):
    rows = []
    for name, predictions in runs.items():
        curve = predictions.curves[0]
        last, used = curve[-1], [row for row in curve[args.burn_in :] if "accept" in row]
        rmse, seconds = PAPER.get(name, ("–", "–"))
        rows.append(
            [
                name,
                f"{last['rmse']:.4f}",
                rmse,
                f"{last['draw_rmse']:.4f}",
                np.mean([row["accept"] for row in used]) if used else None,
                np.mean([row["gradients"] for row in used]) if used else None,
                f"{predictions.seconds:.0f}",
                seconds,
            ]
        )
    titles = ["", "RMSE", "the paper's", "RMSE of the last draw", "acceptance"]
    titles += ["gradients a draw", "seconds", "the paper's"]
    return markdown_table(titles, rows)


def picture(runs, args):
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for i, (name, predictions) in enumerate(runs.items()):
        curve = [row for row in predictions.curves[0] if "seconds" in row]
        if not curve:
            axis.axhline(predictions.curves[0][-1]["rmse"], color="0.6", ls="--", label=name)
            continue
        seconds = [row["seconds"] for row in curve]
        axis.plot(seconds, [row["draw_rmse"] for row in curve], color=f"C{i}", lw=0.8, alpha=0.5)
        averaged = [(row["seconds"], row["rmse"]) for row in curve if "rmse" in row]
        axis.plot(*zip(*averaged, strict=True), color=f"C{i}", lw=2, label=name)
    axis.set(
        xlabel="seconds, tuning included",
        ylabel="RMSE of held-out ratings",
        title="MovieLens-1M, rank 10: predictions averaged after tuning (thick), single draws (thin)",
        ylim=(0.84, 1.15),
    )
    axis.title.set_fontsize(10)
    axis.legend(frameon=False)
    return figure


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--draws", type=int, default=200, help="burn-in, or tuning, included")
    parser.add_argument("--burn-in", type=int, default=100)
    parser.add_argument("--start", choices=("random", "mode"), default="random", help="of samplers")
    parser.add_argument("--ratings", help="GroupLens's ratings.dat; default: the shared file")
    args = parser.parse_args()
    args.rank, args.maxeval = 10, 200
    args.name = "qnhmc_table3" + "_mode" * (args.start == "mode") + "_quick" * args.quick
    path = common.Path(args.ratings) if args.ratings else None
    ratings, _ = movielens.read_ratings(path or common.data_folder() / "movielens/ml1m.npz")
    if args.quick:  # the first five hundred users
        args.rank, args.draws, args.burn_in, args.maxeval = 3, 30, 10, 60
        args.method = ["MAP", "HMC", "QNHMC"]
        ratings = ratings.where(ratings.user < 500)
    held_out = np.random.default_rng(args.seed).random(len(ratings.user)) < 0.1
    train, test = ratings.where(~held_out), ratings.where(held_out)
    sizes = int(ratings.user.max()) + 1, int(ratings.movie.max()) + 1
    found = find_mode(train, test, sizes, args)
    runs = {"MAP": found} if "MAP" in args.method else {}
    for name in args.method:
        if name != "MAP":
            runs[name] = run(name, found.points[0], train, test, sizes, args)
    text = (
        f"{args.draws} draws each, the first {args.burn_in} burn-in, in which QNHMC tunes; one chain, which "
        f"starts at {'the mode' if args.start == 'mode' else 'small random factors'}. "
        "RMSE is that of the predictions averaged over the draws after burn-in. Seconds, of all draws, "
        "are of a machine busy with other work, and of other programs than the paper's."
    )
    common.write(args.folder, args.name, [table(runs, args), text], picture(runs, args))
    naive = movielens.rmse(movielens.mean_of_each_movie(train, test), test)
    scores = {name: done.curves[0][-1]["rmse"] for name, done in runs.items()}
    worse = [name for name in ("MAP", "HMC", "QNHMC") if scores.get(name, 0) > naive]
    if worse:
        sys.exit(f"Check failed: {', '.join(worse)}: no better than movies' means ({naive:.4f}).")
    print(f"Check passed: better than the mean rating of each movie ({naive:.4f}).")


if __name__ == "__main__":
    main()
