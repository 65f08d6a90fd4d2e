"""Bayesian neural network on MNIST: section 4.2 and Appendix H.1 of Chen, Fox & Guestrin (2014).

``python examples/papers/sghmc_mnist.py [folder]`` runs SGD, SGD with momentum, SGLD and SGHMC with
the paper's best settings and writes tables, ``sghmc_mnist.md``, and its Fig. 4, ``sghmc_mnist.png``.
What chains have come to is in the subfolder ``runs``, not for version control: the same command goes
on where a killed run was, and doesn't repeat a finished one. ``--quick`` takes a fifth of the digits
and 20 hidden units, stops in the middle on purpose, and fails if the averaged prediction is bad.
"""

import gzip
import json
import sys
import time

import common
import matplotlib.pyplot as plt
import numpy as np
import pymc as pm
import pytensor
import report

from pymc_sghmc import SGHMC, SGLD, GammaGibbs

pytensor.config.floatX = "float32"  # twice as fast, and η is large enough for it

WEIGHTS = ("A", "B", "a", "b")
PRECISIONS = ("lambda_A", "lambda_B", "lambda_a", "lambda_b")
BATCH_SIZE = 500
MOMENTUM = {"friction": 0.01, "noise_estimate": None, "integrator": "euler"}
# Title, step, temperature and the paper's settings, η for all 50,000 training digits.
METHODS = {
    "sgd": ("SGD", SGLD, 0.0, {"learning_rate": 0.16e-4}),
    "momentum": ("SGD with momentum", SGHMC, 0.0, {"learning_rate": 0.4e-5, **MOMENTUM}),
    "sgld": ("SGLD", SGLD, 1.0, {"learning_rate": 0.2e-4}),
    "sghmc": ("SGHMC", SGHMC, 1.0, {"learning_rate": 0.2e-5, **MOMENTUM}),
    # Not in the paper, and not the posterior: λ = 1 as for the optimisers, and a tenth of the noise.
    "cold": ("SGHMC, T = 0.1", SGHMC, 0.1, {"learning_rate": 0.2e-5, **MOMENTUM}),
}
SCORES = {"error": "test error, %", "log_loss": "log-loss", "ece": "calibration error, %"}
FULL = {"method": list(METHODS), "passes": 800, "chains": 4, "cores": 4}
FULL |= {"rows": 50_000, "hidden": 100, "burn_in": 50, "save_seconds": 60}
QUICK = {"method": ["momentum", "sghmc"], "passes": 20, "chains": 2, "cores": 1}
QUICK |= {"rows": 10_000, "hidden": 20, "burn_in": 8, "save_seconds": 5}


def digits(part):
    """Images, one in a row, and labels, behind the headers of MNIST's files."""
    folder = common.data_folder() / "mnist"
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), "u1")
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), "u1")
    return images[16:].reshape(-1, 784).astype("f4") / 256, labels[8:].astype("i4")


def network(images, labels, hidden, has_precisions):
    """Return the paper's model, or the one with λ = 1."""
    shapes = {"A": (hidden, 10), "B": (784, hidden), "a": 10, "b": hidden}
    with pm.Model() as model:
        x, y = pm.Data("x", images), pm.Data("y", labels)
        weights = {}
        for name in WEIGHTS:
            lam = pm.Gamma(f"lambda_{name}", 1, 1) if has_precisions else 1.0
            weights[name] = pm.Normal(name, 0, tau=2 * lam, shape=shapes[name])  # ∝ exp(−λ‖W‖²)
        A, B, a, b = weights.values()
        pm.Categorical("digit", logit_p=pm.math.sigmoid(x @ B + b) @ A + a, observed=y)
    return model


def predictor(model, images):
    """Compile the class probabilities of these images, given the weights in a point."""
    [p] = model.replace_rvs_by_values([model["digit"].owner.inputs[-1]])
    inputs, given = [model.rvs_to_values[model[name]] for name in WEIGHTS], {model["x"]: images}
    function = model.compile_fn(p, inputs=inputs, point_fn=False, givens=given)
    return lambda point: function(*(point[name] for name in WEIGHTS))


def score(labels, p):
    """Test error, log-loss, and expected calibration error in 15 bins of confidence."""
    right, confidence = p.argmax(axis=1) == labels, p.max(axis=1).astype(float)
    bins = np.minimum((confidence * 15).astype(int), 14)
    truth = np.maximum(p[np.arange(len(labels)), labels], np.finfo("f4").tiny)
    return {
        "error": 1 - right.mean(),
        "log_loss": -np.log(truth).mean(dtype=float),
        "ece": np.abs(np.bincount(bins, right - confidence)).sum() / len(labels),
    }


def precisions(draw):
    """Return λ, which PyMC samples as its logarithm; optimisers have none."""
    point = draw.point
    return {n: float(np.exp(point[f"{n}_log__"])) for n in PRECISIONS if f"{n}_log__" in point}


class Experiment:
    """One method: its model, and what it has come to, which is in two files."""

    def __init__(self, method, args, train, test):
        self.title, self.kind, temperature, settings = METHODS[method]
        self.args, self.train, self.test = args, train, test
        self.samples, self.has_precisions = temperature > 0, temperature == 1
        rate = settings["learning_rate"] * 50_000 / len(train[0])
        self.settings = {**settings, "learning_rate": rate, "temperature": temperature}
        self.model = network(*train, args.hidden, self.has_precisions)
        self.predict, self.score = predictor(self.model, test[0]), lambda p: score(test[1], p)
        self.path = args.folder / "runs" / f"{args.name}_{method}.npz"
        notes = self.notes_path = self.path.with_suffix(".json")
        self.notes = json.loads(notes.read_text()) if notes.exists() else {}

    def run(self):
        """Sample what isn't there yet."""
        args, point = self.args, self.model.initial_point()
        self.load(args.passes)
        if self.predictions.is_finished and self.notes:
            return
        rngs = [np.random.default_rng([args.seed, chain]) for chain in range(args.chains)]
        starts = [{k: r.normal(0, 0.1, point[k].shape).astype("f4") for k in WEIGHTS} for r in rngs]
        steps = [self.step()]
        self.notes = self.notes or times(steps[0], point | starts[0], 3 if args.quick else 10)
        if self.has_precisions:
            steps.append(GammaGibbs([self.model[name] for name in PRECISIONS], model=self.model))
        options = {"initvals": starts, "seed": args.seed, "cores": args.cores, "var_names": ["a"]}
        for passes in (args.passes // 2, args.passes) if args.quick else (args.passes,):
            self.load(passes)
            common.sample(self.model, steps, self.predictions, **options)
        if self.samples:
            self.notes |= self.posterior_predictive(steps)
        self.notes_path.write_text(json.dumps(self.notes))

    def load(self, passes):
        """Take up what there is of so many passes."""
        counts = {name: getattr(self.args, name) for name in ("chains", "burn_in")}
        chosen = {name: getattr(self.args, name) for name in ("seed", "hidden", "rows")}
        options = {"draws": passes, "watch": precisions, "save_seconds": self.args.save_seconds}
        about = self.path, self.settings | chosen | counts, self.predict, self.score
        self.predictions = common.Predictions(*about, **counts, **options)

    def step(self):
        """Build the step for the weights; a draw is a pass over the training digits."""
        return self.kind(
            [self.model[name] for name in WEIGHTS],
            model=self.model,
            batch_size=BATCH_SIZE,
            n_steps=len(self.train[0]) // BATCH_SIZE,
            gradient="plain",
            preconditioner=None,
            **self.settings,
        )

    def posterior_predictive(self, steps):
        """Go on from the last points, and compare PyMC's drawn labels with their probabilities."""
        args, (images, labels) = self.args, [part[:1000] for part in self.test]
        options = {"chains": args.chains, "cores": args.cores, "compute_convergence_checks": False}
        options |= {"initvals": self.predictions.points, "random_seed": args.seed}
        with self.model:
            idata = pm.sample(5 if args.quick else 20, tune=0, step=steps, **options)
            pm.set_data({"x": images, "y": labels})  # of y only the number counts
            drawn = pm.sample_posterior_predictive(idata, var_names=["digit"], random_seed=1)
        counts = np.bincount(drawn.posterior_predictive["digit"].values.ravel(), minlength=10)
        weights = [idata.posterior[name].values for name in WEIGHTS]
        draws = zip(*(x.reshape(-1, *x.shape[2:]) for x in weights), strict=True)
        p = np.array([self.predict(dict(zip(WEIGHTS, draw, strict=True)))[:1000] for draw in draws])
        z = (counts - p.sum((0, 1))) / np.sqrt((p * (1 - p)).sum((0, 1)))
        return {"labels": int(counts.sum()), "z": float(np.abs(z).max())}

    def results(self):
        """Scores of two kinds of prediction: of single chains, and of all chains together."""
        predictions, key = self.predictions, "draw_{}".format
        last = [curve[-1] for curve in predictions.curves]
        averaged = {k: [row[k] for row in last] for k in SCORES}, predictions.mean()
        if self.samples:
            draws = [curve[self.args.burn_in :] for curve in predictions.curves]
            single = {k: [np.mean([row[key(k)] for row in d]) for d in draws] for k in SCORES}
            return {"single draws": (single, None), "average of draws": averaged}
        single = {k: [row[key(k)] for row in last] for k in SCORES}
        together = np.mean([self.predict(point) for point in predictions.points], axis=0)
        return {"last weights": (single, together), "average of iterates": averaged}


def times(step, point, turns):
    """Microseconds of an inner step, and of the compiled minibatch gradient called alone."""
    gradient, position, n_steps = step.tuner.gradient, step.tuner.initial, step.settings["n_steps"]
    rng, found = np.random.default_rng(0), []
    for _ in range(turns):
        began = time.perf_counter()
        point, _ = step.step(point)
        between = time.perf_counter()
        for _ in range(n_steps):
            gradient(position, gradient.order.probe(rng))
        found.append((between - began, time.perf_counter() - between))
    inner, bare = (np.min(found, axis=0) / n_steps * 1e6).tolist()
    return {"step": inner, "gradient": bare, "ratio": inner / bare}


def scores_table(experiments, found, chains):
    rows = []
    for e in experiments:
        for kind, (scores, together) in found[e.title].items():
            joint = {} if together is None else e.score(together)
            row = [e.title, kind, *(cell(scores[key], key) for key in SCORES)]
            rows.append([*row, *(cell([joint[key]], key) if joint else None for key in SCORES)])
    titles = [*SCORES.values(), *(f"all {chains}: {title}" for title in SCORES.values())]
    return report.markdown_table(["method", "predictions of", *titles], rows)


def cell(values, key):
    """Mean ± standard deviation over chains."""
    values, digits = (np.array(values), 4) if key == "log_loss" else (100 * np.array(values), 2)
    spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"


def times_table(experiments):
    titles = ["method", "passes", "seconds", "µs per inner step", "µs per gradient", "ratio"]
    rows = []
    for e in experiments:
        ran = min(e.predictions.made), e.predictions.seconds
        rows.append([e.title, *ran, *(e.notes[key] for key in ("step", "gradient", "ratio"))])
    return report.markdown_table(titles, rows)


def picture(experiments, burn_in):
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    kinds = [("draw_", "-", "present weights"), ("", "--", "average of iterates")]
    for index, e in enumerate(experiments):
        n = min(e.predictions.made)  # a run that is longer may have been killed
        curves = [curve[:n] for curve in e.predictions.curves]
        for prefix, style, kind in [("", "-", "average of draws")] if e.samples else kinds:
            for axis, key in zip(axes, ("error", "log_loss"), strict=False):
                y = [[row[prefix + key] for row in curve[burn_in:]] for curve in curves]
                x, color = range(burn_in + 1, burn_in + 1 + len(y[0])), f"C{index}"
                axis.plot(x, np.mean(y, 0), style, color=color, lw=1, label=f"{e.title}, {kind}")
                axis.fill_between(x, np.min(y, 0), np.max(y, 0), color=color, alpha=0.2, lw=0)
        for c, name in enumerate(PRECISIONS if e.has_precisions else ()):
            y, label = [row[name] for row in curves[0]], f"$\\{name}$, {e.title}"
            look = {"color": f"C{c + 4}", "lw": 1, "ls": ":" if e.kind is SGLD else "-"}
            axes[2].semilogy(range(1, len(y) + 1), y, label=label, **look)
    labels = "test error (bands: all chains)", "test log-loss per digit", "precision λ, first chain"
    for axis, label in zip(axes, labels, strict=True):
        axis.set(xlabel="passes over the training digits", ylabel=label)
        axis.legend(*axis.get_legend_handles_labels(), fontsize=8, ncols=1 + (axis is axes[2]))
    axes[2].set_ylim(5e-3, 1000)  # room for the legend
    return figure


def sentences(args):
    return [
        f"784-{args.hidden}-10 network, {args.rows:,} training digits, {BATCH_SIZE} in a minibatch, "
        f"single precision; a draw after each pass, the first {args.burn_in} dropped; probabilities are "
        f"averaged. Mean ± standard deviation over {args.chains} chains with seeds and starts, N(0, 0.1²), "
        "of their own, and all chains' average. 15 bins of confidence. Seconds, of all chains, include "
        "predicting the test digits. Inner steps and gradients: the fastest of ten rounds, in turn.",
        "The paper reports this experiment in its Fig. 4 only, without numbers. The README of the "
        "authors' code says that with other seeds SGHMC and SGD with momentum don't differ "
        "significantly.",
    ]


def checks(args, experiments, found):
    """Return what was checked in words, and whether all is well."""
    texts, target, passed = [], 0.12 if args.quick else 0.017, True
    for e in experiments:
        for curve in e.predictions.curves:
            passed &= [row["draw"] for row in curve] == list(range(1, len(curve) + 1))
        if e.samples:
            error, z = np.mean(found[e.title]["average of draws"][0]["error"]), e.notes["z"]
            passed &= z < 5 and (error <= target or not args.quick)
            texts.append(
                f"{e.title}: test error at most {100 * target:.1f} %: "
                f"{'yes' if error <= target else 'no'}. {e.notes['labels']:,} labels from "
                "pm.sample_posterior_predictive: their counts by class are within "
                f"{z:.1f} standard deviations of the sums of their probabilities."
            )
    return texts, passed


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--method", choices=METHODS, nargs="+", help="default: all")
    for name, words in {"passes": "over the digits", "chains": "", "cores": "for chains"}.items():
        parser.add_argument(f"--{name}", type=int, help=f"{words} (default: {FULL[name]})".strip())
    parser.set_defaults(**(QUICK if parser.parse_args().quick else FULL))
    args = parser.parse_args()
    args.name = "sghmc_mnist" + "_quick" * args.quick
    if args.passes <= args.burn_in:
        parser.error(f"--passes must be above {args.burn_in}, the passes of burn-in")

    images, labels = digits("train")
    rows = np.random.default_rng(args.seed).permutation(60_000)[: args.rows]
    data = (images[rows], labels[rows]), digits("t10k")
    experiments = [Experiment(method, args, *data) for method in args.method]
    for experiment in experiments:
        experiment.run()

    found = {experiment.title: experiment.results() for experiment in experiments}
    texts, passed = checks(args, experiments, found)
    tables = scores_table(experiments, found, args.chains), times_table(experiments)
    texts = [*tables, *sentences(args), *texts]
    common.write(args.folder, args.name, texts, picture(experiments, args.burn_in))
    if not passed:
        sys.exit("Check failed.")


if __name__ == "__main__":
    main()
