"""What the papers' experiments share: their command line, long runs, tables and pictures."""

import os

# One processor for each chain: BLAS threads would fight with the other chains.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import json
import multiprocessing
import shlex
import sys
import time
import warnings

from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/benchmarks"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import pymc as pm
    import report

matplotlib.use("Agg")

PACKAGES = ("numpy", "pymc", "pytensor", "pymc-sghmc")


def parser(doc):
    """Return the command line that all experiments have; they add options of their own."""
    new = argparse.ArgumentParser(description=doc.splitlines()[0])
    new.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("."),
        help="where table and picture go, and what a killed run needs to go on",
    )
    new.add_argument("--quick", action="store_true", help="a minute's run, to see that it works")
    new.add_argument("--seed", type=int, default=1)
    return new


def data_folder():
    """Folder of the data; ends the script where it is absent."""
    folder = Path(os.environ.get("PYMC_SGHMC_DATA", ROOT / "../shared/data"))
    if not folder.is_dir():
        sys.exit(f"No data at {folder}: set PYMC_SGHMC_DATA to their folder.")
    return folder


class Draw(NamedTuple):
    """What ``pm.sample`` gives a callback, as far as it is used here."""

    chain: int
    draw_idx: int
    point: dict
    stats: list = ()


class Predictions:
    """Callback of ``pm.sample``: averages predictions as draws arrive, so that no draw is stored.

    Every ``save_seconds``, and at the end, it saves the averages and each chain's last point; a run
    that was killed goes on from there.

    Parameters
    ----------
    path : Path
        The file, ``.npz``.
    settings : dict
        Of the experiment, as JSON has them: a file of other settings ends the script.
    predict : callable
        From a point, a dict of unconstrained values, to an array of predictions.
    score : callable
        From the mean of predictions to a dict of numbers.
    watch : callable
        From a draw, with its ``point`` and ``stats``, to a dict of numbers that the curves keep, too.
    chains, draws, burn_in : int
        The first ``burn_in`` of ``draws`` draws of each chain are not averaged.
    curve_every : int
        Draws between two points of a curve.
    save_seconds : float
        Seconds between two savings.
    """

    def __init__(
        self,
        path,
        settings,
        predict,
        score,
        *,
        chains,
        draws,
        burn_in,
        curve_every=1,
        watch=lambda draw: {},
        save_seconds=60,
    ):
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.predict, self.score, self.watch = predict, score, watch
        self.chains, self.draws, self.burn_in = chains, draws, burn_in
        self.curve_every, self.save_seconds = curve_every, save_seconds
        self.made = [0] * chains
        self.sums = [0.0] * chains
        self.points = [None] * chains
        self.curves = [[] for _ in range(chains)]  # of dicts
        self.seconds, self.gigabytes = 0.0, 0.0
        self.saved = self.begun = time.monotonic()
        if path.exists():
            self._load()
        self.before = list(self.made)  # the draws of pm.sample come after these

    @property
    def is_finished(self):
        """Whether all chains have made their draws."""
        return min(self.made) >= self.draws

    def mean(self, chains=None):
        """Mean prediction of some chains, all by default, over the draws after burn-in."""
        chains = [
            c
            for c in (range(self.chains) if chains is None else chains)
            if self.made[c] > self.burn_in
        ]
        total = sum(self.made[c] - self.burn_in for c in chains)
        return sum(self.sums[c] for c in chains) / total if chains else None

    def __call__(self, trace, draw):
        """Take in a draw."""
        chain, made = draw.chain, self.before[draw.chain] + draw.draw_idx + 1
        if made > self.draws:  # this chain was ahead of others when the run was killed
            return
        self.made[chain], self.points[chain] = made, draw.point
        prediction = self.predict(draw.point)
        if made > self.burn_in:
            self.sums[chain] = self.sums[chain] + prediction
        if made % self.curve_every == 0 or made == self.draws:
            row = {"draw": made, "all_draws": sum(self.made), **self.watch(draw)}
            row |= {f"draw_{key}": value for key, value in self.score(prediction).items()}
            if made > self.burn_in:
                row |= self.score(self.mean([chain]))
                row |= {f"all_{key}": value for key, value in self.score(self.mean()).items()}
            self.curves[chain].append(row)
        if time.monotonic() - self.saved > self.save_seconds or self.is_finished:
            self.save()

    def save(self):
        """Write the file anew, in one go."""
        now = time.monotonic()
        self.seconds, self.begun, self.saved = self.seconds + now - self.begun, now, now
        arrays = {
            f"{key}:{chain}:{name}": value
            for chain in range(self.chains)
            if self.points[chain] is not None
            for key, part in (
                ("point", self.points[chain]),
                ("sum", {"": self.sums[chain]}),
            )
            for name, value in part.items()
        }
        about = {"settings": self.settings, "made": self.made, "curves": self.curves}
        self.gigabytes = float(np.fmax(self.gigabytes, memory_in_use()))
        about |= {"seconds": self.seconds, "gigabytes": self.gigabytes}
        about["together"] = self.score(self.mean()) if max(self.made) > self.burn_in else {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new.npz")
        np.savez(new, about=json.dumps(about, default=float), **arrays)
        os.replace(new, self.path)

    def _load(self):
        about = saved(self.path)
        if about["settings"] != self.settings:
            sys.exit(
                f"{self.path} is of a run with other settings, {about['settings']}, not "
                f"{self.settings}. Move it away, or choose another folder."
            )
        with np.load(self.path, allow_pickle=False) as file:
            self.made, self.curves = about["made"], about["curves"]
            self.seconds, self.gigabytes = about["seconds"], about.get("gigabytes", 0.0)
            for key in file.files:
                if key != "about":
                    kind, chain, name = key.split(":", 2)
                    if kind == "sum":
                        self.sums[int(chain)] = file[key]
                    else:
                        self.points[int(chain)] = (self.points[int(chain)] or {}) | {
                            name: file[key]
                        }


def memory_in_use():
    """Gigabytes of this process and its workers, shared pages counted once; NaN if not on Linux."""
    total = 0
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # another system, or a worker that has just ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e6 or float("nan")


def saved(path):
    """Read settings, curves, draws made and seconds of a run, without its arrays."""
    with np.load(path, allow_pickle=False) as file:
        return json.loads(str(file["about"]))


def sample(model, step, predictions, *, initvals, seed, var_names, tune=0, **kwargs):
    """Make the draws that ``predictions`` still owes: all of them, or those after a kill."""
    if predictions.is_finished:
        return None
    starts = [
        point if point is not None else start
        for point, start in zip(predictions.points, initvals, strict=True)
    ]
    first = min(predictions.made)
    with model:
        idata = pm.sample(
            predictions.draws - first - tune,
            tune=tune,
            chains=predictions.chains,
            step=step,
            initvals=starts,
            callback=predictions,
            var_names=var_names,
            random_seed=seed * 1_000_003 + sum(predictions.made),  # another one after a kill
            compute_convergence_checks=False,
            **kwargs,
        )
    if not predictions.is_finished:
        predictions.save()
        sys.exit("Sampling has ended early. The same command goes on from here.")
    return idata


def write(folder, name, texts, figure=None):
    """Write ``name.md``, tables and sentences, and ``name.png``; say by which command."""
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python examples/papers/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()
    note = report.note(report.closing(MACHINE, *PACKAGES))
    text = "\n\n".join([f"```\n{command}\n```", *texts, note])
    (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if figure is not None:
        figure.savefig(folder / f"{name}.png", dpi=110)


MACHINE = report.machine()
