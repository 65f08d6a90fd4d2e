"""Table 1 of the SGHMC paper: Bayesian matrix factorisation of a million film ratings.

    python examples/papers/sghmc_movielens.py [folder] [--method SGHMC ...] [--fold 0 ...]
        [--draws 40] [--chains 4] [--ratings ml-1m/ratings.dat] [--quick]

Chen, Fox & Guestrin (2014), section 4.3 and appendix H.2: rank 20, minibatches of 4,000 ratings, a
Gibbs step for the precisions after every 2,000 steps, five folds. Predictions are averaged as draws
arrive: 200,000 unknowns a draw aren't stored. What each run needs to go on after a kill, and its
averages, are in ``folder``/runs, and a finished run goes on if ``--draws`` is larger; the table is
made of all finished runs that are there.
"""

import sys

import common
import matplotlib.pyplot as plt
import movielens
import numpy as np

from movielens import NAMES
from report import markdown_table

from pymc_sghmc import SGHMC, SGLD, GammaGibbs

# Steps of H.2. The authors divide ratings by 4 (their published settings), so that their factors are
# half as large as ours, and learning rates, in squared units of the unknowns, a quarter.
UNIT = 4
MOMENTUM = {"friction": 0.05, "noise_estimate": None, "integrator": "euler"}
OPTIMISE = {"temperature": 0.0}
METHODS = {
    "SGD": (SGLD, {"learning_rate": 0.4e-5 * UNIT, **OPTIMISE}),
    "SGD with momentum": (SGHMC, {"learning_rate": 0.4e-6 * UNIT, **MOMENTUM, **OPTIMISE}),
    "SGLD": (SGLD, {"learning_rate": 0.8e-5 * UNIT}),
    "SGHMC": (SGHMC, {"learning_rate": 0.4e-6 * UNIT, **MOMENTUM}),
}
PAPER = {
    "SGD": ".8538 ± .0009",
    "SGD with momentum": ".8539 ± .0009",
    "SGLD": ".8412 ± .0009",
    "SGHMC": ".8411 ± .0011",
}
PRECISIONS = {"lam_a": 8.0, "lam_b": 3.0, "tau": 1.6}  # of the optimisers, near the posterior's


def is_optimiser(method):
    return "temperature" in METHODS[method][1]


def draws_of(method, args):
    return args.burn_in + 1 if is_optimiser(method) else args.draws


def settings_of(method, args, fold):
    """Return what a run of other settings can't go on with."""
    shared = {"fold": fold, "rank": args.rank, "seed": args.seed, "chains": args.chains}
    more = {"n_steps": args.n_steps, "burn_in": args.burn_in}
    if args.ratings:
        more["ratings"] = args.ratings
    if is_optimiser(method):
        more["precision"] = args.precision
    return {"method": method, **METHODS[method][1], **shared, **more}


def run_path(args, method, fold):
    return args.folder / "runs" / f"{args.name}_{method.replace(' ', '_')}_{fold}.npz"


def run(method, fold, ratings, folds, args):
    """Sample one fold, or go on with it, and return its predictions."""
    sampler, settings = METHODS[method]
    train, test = ratings.where(folds != fold), ratings.where(folds == fold)
    fixed = {"lam_U": args.precision, "lam_V": args.precision, **PRECISIONS}
    n_users, n_movies = int(ratings.user.max()) + 1, int(ratings.movie.max()) + 1
    predictions = common.Predictions(
        run_path(args, method, fold),
        settings_of(method, args, fold),
        movielens.predictor(test, train.rating.mean()),
        lambda prediction: {"rmse": movielens.rmse(prediction, test)},
        chains=1 if is_optimiser(method) else args.chains,
        draws=draws_of(method, args),
        burn_in=args.burn_in,
        watch=lambda draw: {
            name: float(np.exp(x)) for name, x in draw.point.items() if name.endswith("_log__")
        },
    )
    if predictions.is_finished:
        return predictions
    print(f"{method}, fold {fold}", flush=True)
    model = movielens.factorisation(
        train, n_users, n_movies, args.rank, fixed if is_optimiser(method) else None
    )
    with model:
        step = sampler(
            [model[name] for name in NAMES],
            batch_size=args.batch_size,
            n_steps=args.n_steps,
            gradient="plain",
            preconditioner=None,
            **settings,
        )
        steps = [step]
        precisions = [] if is_optimiser(method) else [*(f"lam_{name}" for name in NAMES), "tau"]
        if precisions:
            steps.append(GammaGibbs([model[name] for name in precisions]))
    rng = np.random.default_rng([args.seed, fold])
    common.sample(
        model,
        steps,
        predictions,
        initvals=[movielens.start(model, rng) for _ in range(predictions.chains)],
        seed=args.seed,
        var_names=precisions or ["a"],
        cores=args.cores,
    )
    return predictions


def finished(args):
    """Return the finished runs with these settings, by method and fold."""
    found = {}
    for method in METHODS:
        for fold in range(movielens.N_FOLDS):
            path = run_path(args, method, fold)
            if path.exists():
                about = common.saved(path)
                is_done = min(about["made"]) >= draws_of(method, args)
                if is_done and about["settings"] == settings_of(method, args, fold):
                    found[method, fold] = about
    return found


def last_score(about):
    """RMSE of the mean over draws of all chains; for optimisers, that of their last point."""
    if about["settings"].get("temperature") == 0:
        return about["curves"][0][-1]["draw_rmse"]
    return about["together"]["rmse"]


def table(runs, args):
    rows = []
    for method in METHODS:
        ours = [about for (name, _), about in runs.items() if name == method]
        if not ours:
            continue
        scores = np.array([last_score(about) for about in ours])
        spread = f" ± {scores.std(ddof=1):.4f}" if len(scores) > 1 else ""
        fold_0 = runs.get((method, 0))
        steps = sorted({sum(about["made"]) * args.n_steps for about in ours})
        rows.append(
            [
                method,
                f"{scores.mean():.4f}{spread}",
                PAPER[method],
                len(ours),
                f"{last_score(fold_0):.4f}" if fold_0 else "–",
                " or ".join(f"{n:,}" for n in steps),
                f"{np.mean([about['seconds'] for about in ours]):,.0f}",
            ]
        )
    titles = ["", "RMSE, ± sd over folds", "the paper's", "folds", "RMSE, fold 0"]
    return markdown_table([*titles, "steps, all chains", "seconds a fold"], rows)


def trend(runs, args):
    """RMSE of the averaged predictions of fold 0 against steps of all chains."""
    curves = {}
    for (method, fold), about in runs.items():
        if fold == 0 and about["settings"].get("temperature") != 0:
            rows = [row for row in about["curves"][-1] if "all_rmse" in row]
            chains = len(about["curves"])
            steps = [row.get("all_draws", row["draw"] * chains) * args.n_steps for row in rows]
            curves[method] = steps, [row["all_rmse"] for row in rows]
    return curves


def picture(runs, args):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for i, (method, (steps, scores)) in enumerate(trend(runs, args).items()):
        left.plot(steps, scores, color=f"C{i}", label=f"{method}, predictions averaged")
        draws = [row["draw_rmse"] for row in runs[method, 0]["curves"][-1]][-len(steps) :]
        left.plot(steps, draws, color=f"C{i}", ls=":", label=f"{method}, single draws")
    for i, method in enumerate(("SGD", "SGD with momentum"), 2):
        if (method, 0) in runs:
            label = f"{method}, its last point"
            left.axhline(last_score(runs[method, 0]), color=f"C{i}", ls="--", label=label)
    left.set(xlabel="steps of all chains, burn-in included", ylabel="RMSE of test ratings, fold 0")
    left.legend(frameon=False, fontsize=9)
    sampled = runs.get(("SGHMC", 0)) or runs.get(("SGLD", 0))
    for name in [f"lam_{name}_log__" for name in NAMES] if sampled else []:
        for chain, curve in enumerate(sampled["curves"]):
            steps = [row["draw"] * args.n_steps for row in curve]
            right.plot(
                steps,
                [row[name] for row in curve],
                color=f"C{NAMES.index(name[4])}",
                lw=1,
                label=f"λ of {name[4]}" if chain == 0 else None,
            )
    right.set(xlabel="steps of a chain", ylabel="precision", yscale="log")
    right.legend(frameon=False, fontsize=9)
    figure.suptitle("Bayesian matrix factorisation of MovieLens-1M by stochastic gradients")
    return figure


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--fold", nargs="+", type=int, default=list(range(movielens.N_FOLDS)))
    parser.add_argument("--draws", type=int, default=40, help="of each chain, burn-in included")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--ratings", help="GroupLens's ratings.dat; default: the shared file")
    parser.add_argument("--precision", type=float, default=28.0, help="of factors, in optimisers")
    args = parser.parse_args()
    args.rank, args.batch_size, args.n_steps, args.burn_in = 20, 4000, 2000, 15
    args.name = "sghmc_movielens" + "_quick" * args.quick
    path = common.Path(args.ratings) if args.ratings else None
    ratings, folds = movielens.read_ratings(
        path or common.data_folder() / "movielens/ml1m.npz", args.seed
    )
    if args.quick:  # the first thousand users, few steps of few ratings
        args.rank, args.batch_size, args.n_steps, args.burn_in = 4, 1000, 300, 4
        args.draws, args.chains, args.cores = 8, 2, 1
        args.method, args.fold = ["SGD with momentum", "SGHMC"], [0]
        few = ratings.user < 1000
        ratings, folds = ratings.where(few), folds[few]
    if args.draws <= args.burn_in:
        parser.error(f"--draws must be above {args.burn_in}, the draws of burn-in")
    for fold in args.fold:
        for method in args.method:
            run(method, fold, ratings, folds, args)
    runs = finished(args)
    gigabytes = max(about.get("gigabytes", 0.0) for about in runs.values())
    memory = f"Most memory of all processes together, looked at every minute: {gigabytes:.2f} GB."
    text = (
        f"Rank {args.rank}, {args.batch_size:,} ratings in a minibatch, a draw after each "
        f"{args.n_steps:,} steps, the first {args.burn_in} of each chain dropped. RMSE: of predictions "
        "averaged over the draws of all chains; of the optimisers, by their last point. Seconds are of "
        "a machine that may have been busy with other work."
    )
    common.write(args.folder, args.name, [table(runs, args), text, memory], picture(runs, args))
    check(runs, ratings, folds)


def check(runs, ratings, folds):
    """Fail if averaged predictions are no better than the mean rating of each movie."""
    for (method, fold), about in runs.items():
        train, test = ratings.where(folds != fold), ratings.where(folds == fold)
        naive = movielens.rmse(movielens.mean_of_each_movie(train, test), test)
        if last_score(about) > naive:
            ours = f"{method}, fold {fold}: RMSE {last_score(about):.4f}"
            sys.exit(f"Check failed: {ours}, {naive:.4f} by movies' means.")
    print("Check passed: better than the mean rating of each movie.")


if __name__ == "__main__":
    main()
