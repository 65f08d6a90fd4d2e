"""Faults of all kinds, at random moments, on runs in a RunStore: what is lost?

    python tests/runs/faults.py [--tries 20] [--fault kill collide ...] [--seed 0]

prints one line for each fault: tries, how many were refused in words, and how many lost something, were silently other
draws, or ended in another error: losses. Draws, statistics and unknowns are compared bit by bit with those of a
run that nothing has ended. Steps and model are built once; each run is a process of its own, forked.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings

from functools import cache
from pathlib import Path

import numpy as np
import pymc as pm

from filelock import FileLock

from pymc_sghmc import SGHMC, RunStore
from pymc_sghmc.runs import recorder, run_folder

DRAWS, TUNE, CHAINS = 260, 140, 2
OPTIONS = {
    "draws": DRAWS, "tune": TUNE, "chains": CHAINS, "random_seed": 5, "progressbar": False,
    "compute_convergence_checks": False, "discard_tuned_samples": False,
}  # fmt: skip
FORESEEN = ValueError, OSError  # that may end a run, in words


def often():
    """Let segments be written every few draws."""
    recorder.SECONDS = recorder.LONGEST = 0.02
    run_folder.WAIT = 5.0


@cache
def model():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 2))
    with pm.Model(coords={"k": ["a", "b"]}) as made:
        beta = pm.Normal("beta", 0, 1, dims="k")
        sigma = pm.HalfNormal("sigma", 1)
        pm.Normal("y", x @ beta, sigma, observed=x @ [1, 2] + rng.normal(size=400))
    return made


@cache
def step():
    with model():
        return SGHMC(batch_size=20, n_steps=2, compile_kwargs={"mode": "FAST_COMPILE"})


def sample(folder, cores=1, **options):
    """Start the script, again or for the first time."""
    trace = {} if folder is None else {"trace": RunStore(folder)}
    with model(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pm.sample(step=step(), cores=cores, **OPTIONS | trace | options)


@cache
def undisturbed():
    """What a run gives that nothing ends."""
    return sample(None)


def difference(idata) -> str:
    """Say what is other than in the undisturbed run; nothing if all is the same."""
    for group in "posterior", "warmup_posterior", "sample_stats", "warmup_sample_stats":
        expected, found = undisturbed()[group], idata[group]
        for name in set(expected.data_vars) - {"warning"}:
            if name not in found.data_vars:
                return f"{group}/{name} isn't there"
            if not np.array_equal(
                expected[name].to_numpy(), found[name].to_numpy(), equal_nan=True
            ):
                return f"{group}/{name} is other"
    return ""


def in_a_process(function, *args):
    """Run a function in a process and a group of its own; return its number."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    code = 1
    try:
        logging.disable(logging.CRITICAL)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        is_wrong = function(*args)
        code = int(is_wrong is True)
    except KeyboardInterrupt:
        code = 3
    except FORESEEN as error:
        code = 2 if len(str(error)) > 20 else 1
    finally:
        os._exit(code)


def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@cache
def seconds(cores):
    """How long a whole run takes."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        end_of(in_a_process(sample, folder, cores))
        return time.perf_counter() - began


def rest(folder, cores=1) -> str:
    """Start the script again; say what is other in the end."""
    return difference(sample(folder, cores))


def kill(folder, rng):
    """SIGKILL again and again, at any moment of a run's life; the process alone, or with its workers."""
    for _ in range(rng.integers(1, 4)):
        cores = int(rng.integers(1, 3))
        pid = in_a_process(sample, folder, cores)
        time.sleep(rng.uniform(0, 1.05 * seconds(cores)))
        (os.kill if rng.random() < 0.5 else os.killpg)(pid, signal.SIGKILL)
        end_of(pid)
    return rest(folder, int(rng.integers(1, 3)))


def interrupt(folder, rng):
    """Ctrl-C at any moment: a clean result, or words, and the same draws in the end."""

    def stopped():
        with np.errstate(all="ignore"):
            idata = sample(folder, cores)
        return any(np.isnan(x).any() for x in idata.posterior.values())

    cores = int(rng.integers(1, 3))
    pid = in_a_process(stopped)
    time.sleep(rng.uniform(0.02, seconds(cores)))
    os.killpg(pid, signal.SIGINT)
    code = end_of(pid)
    return f"ended with {code}" if code not in (0, 2, 3) else rest(folder)


def begun(folder, rng, cores=1):
    """A run that was killed halfway."""
    pid = in_a_process(sample, folder, cores)
    while sum(path.name.startswith("state") for path in Path(folder).rglob("*.npz")) < 1:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.5 * seconds(cores)))
    os.killpg(pid, signal.SIGKILL)
    end_of(pid)


def collide(folder, rng):
    """Two go on with one run: one does, the other is refused, or comes after it."""
    begun(folder, rng)
    pids = [in_a_process(sample, folder, int(rng.integers(1, 3))) for _ in range(2)]
    codes = sorted(map(end_of, pids))
    return f"ended with {codes}" if codes not in ([0, 0], [0, 2]) else rest(folder)


def hold(folder, rng):
    """A run that another process goes on writing to is left alone."""
    begun(folder, rng)
    run_folder.WAIT = 0.2
    try:
        with FileLock(Path(folder) / run_folder.LOCK):
            rest(folder)
        return "it went on"
    except ValueError as error:
        return "" if "another process" in str(error) else str(error)
    finally:
        often()


def damage(folder, rng):
    """One byte that is other, or a file that is cut short: noticed in words, or without effect."""
    begun(folder, rng)
    path = rng.choice(
        sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.stat().st_size)
    )
    contents = bytearray(path.read_bytes())
    place = int(rng.integers(len(contents)))
    if rng.random() < 0.5:
        contents[place] ^= int(rng.integers(1, 256))
    else:
        del contents[place:]
    path.write_bytes(contents)
    try:
        return rest(folder)
    except ValueError as error:
        return "refused" if path.name in str(error) else f"other words: {error}"


def read(folder, rng):
    """Read after one byte has changed: the draws that were written, or words."""
    sample(folder)
    path = rng.choice(sorted(Path(folder).rglob("draws-*")))
    contents = bytearray(path.read_bytes())
    contents[int(rng.integers(len(contents)))] ^= int(rng.integers(1, 256))
    path.write_bytes(contents)
    try:
        return difference(RunStore(folder).to_inference_data())
    except ValueError as error:
        return "refused" if path.name in str(error) else f"other words: {error}"


def worker(folder, rng):
    """A worker is killed: words, and the same draws when it goes on."""

    def run():
        def kill_worker(trace, draw):
            if draw.draw_idx == at:
                for pid in children():
                    os.kill(pid, signal.SIGKILL)

        sample(folder, 2, callback=kill_worker)

    at = int(rng.integers(5, DRAWS))
    code = end_of(in_a_process(run))
    return f"ended with {code}" if code != 2 else rest(folder)


def children():
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def orphans(folder, rng):
    """The process is killed without its workers: they end within seconds."""
    pid = in_a_process(sample, folder, 2)
    time.sleep(rng.uniform(0.3, 0.9) * seconds(2))
    alive = killed_alone(pid)
    return f"{alive} still live" if alive else rest(folder)


def killed_alone(pid):
    """Kill a process without its workers; return those that still live after three seconds."""
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(pid, signal.SIGKILL)
    end_of(pid)
    time.sleep(3)
    return [w for w in workers if os.path.exists(f"/proc/{w}") and "Z" not in state(w)]


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return "Z"


def full(folder, rng):
    """No space left, at some file: words, and the same draws once there is space."""

    def run():
        count, replace = 0, os.replace

        def full_disk(*args):
            nonlocal count
            count += 1
            if count >= at:
                raise OSError(28, "No space left on device")
            return replace(*args)

        os.replace = full_disk
        sample(folder)

    at = int(rng.integers(1, 40))
    code = end_of(in_a_process(run))
    return f"ended with {code}" if code not in (0, 2) else rest(folder)


FAULTS = kill, interrupt, collide, hold, damage, read, worker, orphans, full


def losses(fault, tries, seed):
    """Try a fault so often; return how many tries were refused in words, and what was lost."""
    often()
    undisturbed()
    refused, lost = 0, []
    for k in range(tries):
        folder = tempfile.mkdtemp()
        try:
            what = fault(folder, np.random.default_rng([seed, k]))
        except Exception as error:  # of whatever kind: it is a loss
            what = f"{type(error).__name__}: {error}"
        refused += what == "refused"
        if what not in ("", "refused"):
            lost.append(f"try {k}: {what}"[:300])
        shutil.rmtree(folder, ignore_errors=True)
    return refused, lost


def main():
    """Try, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    named = {fault.__name__: fault for fault in FAULTS}
    parser.add_argument("--fault", nargs="+", default=list(named), choices=named, metavar="FAULT")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in args.fault:
        refused, lost = losses(named[name], args.tries, args.seed)
        row = {"fault": name, "tries": args.tries, "refused in words": refused, "lost": len(lost)}
        print(json.dumps({**row, "pymc": pm.__version__, "which": lost[:5]}), flush=True)


if __name__ == "__main__":
    main()
