"""Arrays that processes share: the same numbers, one copy, and nothing left behind."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

from multiprocessing import get_context

import cloudpickle
import numpy as np
import pymc as pm
import pytest

from conftest import ROOT

from pymc_sghmc import QNHMC, SGHMC, SGLD, GammaGibbs
from pymc_sghmc.runs import shared_arrays
from pymc_sghmc.runs.shared_arrays import Handle, attach, dumps, loads, share

N = 200_000
needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps_rollup"),
    reason="memory and descriptors of processes are read from Linux's /proc",
)


def numbers(shape=(N, 2), dtype=float):
    return np.random.default_rng(1).normal(scale=1e6, size=shape).astype(dtype)


ARRAYS = {
    "C": numbers,
    "Fortran": lambda: np.asfortranarray(numbers()),
    "vector": lambda: numbers(N),
    "one row": lambda: numbers((1, N)),
    "rows left out": lambda: numbers()[::-3],
    "columns left out": lambda: numbers((N // 4, 8))[:, 1:],
    "transposed": lambda: np.moveaxis(numbers((2, N // 8, 4)), 0, 1),
    "float32": lambda: numbers(dtype="f4"),
    "other byte order": lambda: numbers(dtype=">f8"),
    "dates": lambda: numbers().astype("M8[s]"),
    "structured": lambda: numbers().view([("a", "f4"), ("b", "i4")]),
    "read-only": lambda: np.frombuffer(numbers().tobytes()),
}


@pytest.fixture(params=["descriptors", "names"])
def files(request, monkeypatch, tmp_path):
    """Both kinds of file; returns the folder where those with names are."""
    if request.param == "descriptors" and not shared_arrays.HAS_DESCRIPTORS:
        pytest.skip("this platform doesn't show the descriptors of processes")
    monkeypatch.setattr(shared_arrays, "HAS_DESCRIPTORS", request.param == "descriptors")
    monkeypatch.setattr(shared_arrays, "MEMORY_FOLDER", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", ARRAYS)
def test_the_same_array_comes_back(kind, files):
    array = ARRAYS[kind]()
    handle = share(array)
    assert isinstance(handle, Handle)
    assert len(pickle.dumps(handle)) < 1000
    back = attach(handle)
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    for flag in ("fnc", "writeable"):
        assert back.flags[flag.upper()] == array.flags[flag.upper()]
    assert back.flags.forc


def test_small_masked_and_object_arrays_stay_what_they_are():
    edge = np.zeros(2**17)  # of 1 MiB
    assert isinstance(share(edge), Handle)
    large = numbers()
    for array in (edge[1:], np.ma.masked_less(large, 0), large.astype(object)):
        assert share(array) is array
        assert attach(array) is array


def test_writing_to_an_attached_array_changes_no_other(files):
    array = numbers()
    handle = share(array)
    first, second = attach(handle), attach(handle)
    first[:] = 0
    np.testing.assert_array_equal(second, array)
    np.testing.assert_array_equal(attach(share(array)), array)


def test_a_file_for_each_array_while_it_lives_and_does_not_change(files):
    array = numbers()
    handle = share(array)
    assert share(array) == handle
    assert share(array[:]) == handle  # a view of all of it
    assert len(os.listdir(files)) == (not shared_arrays.HAS_DESCRIPTORS)
    time.sleep(0.02)  # more than the clock of file systems
    array[-1, -1] += 1  # as a model's data may be changed between two runs
    changed = share(array)
    assert changed.identity != handle.identity
    np.testing.assert_array_equal(attach(changed), array)
    with pytest.raises(FileNotFoundError, match="is gone"):
        attach(handle)
    mapped, copy = attach(changed), array.copy()
    del array
    assert os.listdir(files) == []
    with pytest.raises(FileNotFoundError, match="is gone"):
        attach(changed)
    np.testing.assert_array_equal(mapped, copy)  # who has it keeps it


def test_a_view_does_not_take_the_file_with_it():
    array = numbers()
    view = array[1:]
    handle = share(view)
    del view
    np.testing.assert_array_equal(attach(handle), array[1:])


def test_memory_maps_are_shared_by_their_own_file(tmp_path):
    path = tmp_path / "data"
    written = np.memmap(path, float, "w+", 80, (N, 2))
    written[:] = numbers()
    written.flush()
    before = dict(shared_arrays._files)
    for mode in ("r", "r+"):
        mapped = np.memmap(path, float, mode, 80, (N, 2))
        for array in (mapped, mapped[1000:], np.asarray(mapped)[1000:], mapped.T):
            handle = share(array)
            assert handle.filename == str(path)
            back = attach(handle)
            np.testing.assert_array_equal(back, array)
            assert (back.flags.fnc, back.flags.writeable) == (array.flags.fnc, mode == "r+")
    assert shared_arrays._files == before
    # these hold other numbers than the file, or no straight part of it
    private = np.memmap(path, float, "c", 80, (N, 2))
    private[0] = 7
    for array in (private, mapped[::2], mapped + 1):
        handle = share(array)
        assert handle.filename != str(path)
        np.testing.assert_array_equal(attach(handle), array)
    handle = share(mapped)
    os.replace(_copy(path), path)
    with pytest.raises(FileNotFoundError, match="moved or replaced"):
        attach(handle)


def _copy(path):
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    return copy


def test_pickles_hold_handles_and_keep_identities():
    large, small = numbers(), numbers((10, 2))
    value = {"a": large, "b": (large, small), "f": lambda: large}
    pickled = dumps(value)
    assert len(pickled) < 3000
    assert len(pickle.dumps(large)) > large.nbytes
    back = pickle.loads(pickled)
    np.testing.assert_array_equal(back["a"], large)
    np.testing.assert_array_equal(back["b"][1], small)
    assert back["b"][0] is back["a"]
    assert back["f"]() is back["a"]


def test_objects_apart_are_not_in_the_pickle():
    class Named:
        def __init__(self, name):
            self.name = name

    mine, yours, other = Named("mine" * 1000), Named("yours"), Named("other")
    pickled = dumps({"a": [mine, other], "f": lambda: mine}, [other, mine])
    assert len(pickled) < 2000
    back = loads(pickled, [other, yours])
    assert back["a"] == [yours, other]
    assert back["f"]() is yours


def read(handle, answers):
    array = attach(handle)
    answers.put((os.getpid(), array.sum()))
    time.sleep(60)


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_other_processes_read_it_and_may_be_killed(method, files):
    try:
        context = get_context(method)
    except ValueError:
        pytest.skip(f"no {method} on this platform")
    array = numbers()
    answers = context.SimpleQueue()
    handle = share(array)
    process = context.Process(target=read, args=(handle, answers))
    process.start()
    pid, answer = answers.get()
    process.kill()
    process.join()
    assert pid != os.getpid()
    assert answer == array.sum()
    assert share(array) == handle
    del array
    assert os.listdir(files) == []
    with pytest.raises(FileNotFoundError, match="is gone"):
        attach(handle)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_forked_processes_do_not_remove_their_parents_files(files):
    arrays = [numbers()]
    handle = share(arrays[0])
    pid = os.fork()
    if pid == 0:
        mine = share(arrays[0])  # their own, as this process may outlive its parent
        arrays.clear()
        os._exit(int(mine.identity == handle.identity))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    np.testing.assert_array_equal(attach(handle), arrays[0])


KILLED = """
import os, sys, tempfile
import numpy as np
from pymc_sghmc.runs import shared_arrays

shared_arrays.MEMORY_FOLDER = sys.argv[1]
shared_arrays.HAS_DESCRIPTORS = sys.argv[2] == "True"
array = np.ones(10**6)
shared_arrays.share(array)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.process
@pytest.mark.parametrize("end", ["returns", "killed"])
def test_nothing_is_left_of_a_process(end, files):
    descriptors = shared_arrays.HAS_DESCRIPTORS
    if end == "killed" and not descriptors:
        pytest.skip("a file with a name outlives a process that is killed")
    process = subprocess.run(
        [sys.executable, "-c", KILLED, files, str(descriptors), end], timeout=120, check=False
    )
    assert process.returncode == (-signal.SIGKILL if end == "killed" else 0)
    assert os.listdir(files) == []


def test_no_room(files, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    array = numbers()
    before = dict(shared_arrays._files)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (array.nbytes - 1, limits[1]))
    try:  # it turns out while the file is written
        with pytest.raises(OSError, match=r'0\.0032 GB.* TMPDIR .*mp_ctx="fork".* np\.memmap'):
            share(array)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(files) == []
    assert shared_arrays._files == before
    full = type(shared_arrays.shutil.disk_usage(files))(10, 10, 0)
    with monkeypatch.context() as patched:
        patched.setattr(shared_arrays.shutil, "disk_usage", lambda folder: full)
        with pytest.raises(OSError, match="no room"):
            share(array)
    np.testing.assert_array_equal(attach(share(array)), array)  # there is room again


def test_the_second_folder_is_used_where_the_first_is_missing(files, monkeypatch):
    monkeypatch.setattr(shared_arrays, "MEMORY_FOLDER", str(files / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    array = numbers()
    np.testing.assert_array_equal(attach(share(array)), array)


def test_numba_compiles_nothing_for_attached_arrays():
    numba = pytest.importorskip("numba")
    function = numba.njit(lambda array: array.sum())
    array = numbers()
    for original in (array, np.asfortranarray(array)):
        function(original)
        known = len(function.signatures)
        handle = share(original)
        assert function(attach(handle)) == function(original)
        assert len(function.signatures) == known
    function(attach(handle._replace(writeable=False)))
    assert len(function.signatures) == known + 1


# Memory: that of all processes, each page once, and of files without a name. A run on few rows
# tells what the interpreters need.
MEMORY = f"""
import os, stat, sys, threading, warnings

sys.path.insert(0, {str(ROOT)!r})
import numpy as np, pymc as pm, pytensor, pytensor.tensor as pt
from pymc_sghmc import SGLD
from pymc_sghmc.runs import shared_arrays

D = 50
warnings.simplefilter("ignore", FutureWarning)  # PyMC 6 of return_inferencedata=False


def processes():
    parents = {{}}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{{pid}}/stat") as file:
                parents[int(pid)] = int(file.read().rsplit(")", 1)[1].split()[1])
        except (OSError, LookupError, ValueError):  # it has just ended, or has an odd name
            pass
    tree = [os.getpid()]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def memory():
    total = 0
    for pid in processes():
        try:
            with open(f"/proc/{{pid}}/smaps_rollup") as file:
                lines = [line.split() for line in file]
        except OSError:
            continue
        total += sum(int(line[1]) * 1024 for line in lines if line[0] == "Pss_Anon:")
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found = os.stat(f"/proc/self/fd/{{descriptor}}")
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
            total += found.st_blocks * 512
    return total


class Peak(threading.Thread):
    def __enter__(self):
        self.ended, self.bytes, self.error = threading.Event(), 0, None
        self.start()
        return self

    def run(self):
        try:
            while not self.ended.wait(0.01):
                self.bytes = max(self.bytes, memory())
        except Exception as error:
            self.error = error

    def __exit__(self, *error):
        self.ended.set()
        self.join()
        if self.error is not None:
            raise self.error


def sample(X, **settings):
    # until all chains have run at the same time
    seen = set()

    def stop(trace, draw):
        seen.add(draw.chain)
        if len(seen) == settings["chains"]:
            raise KeyboardInterrupt

    with pm.Model():
        beta = pm.Normal("beta", shape=D)
        mu = pytensor.shared(X, borrow=True) @ beta
        pm.Normal("y", mu, 1.0, observed=np.zeros(len(X), dtype="int8"))
        step = SGLD(learning_rate=1e-8, gradient="plain", batch_size=100)
        pm.sample(
            50_000, tune=0, step=step, callback=stop, return_inferencedata=False,
            progressbar=False, compute_convergence_checks=False, random_seed=1, **settings,
        )
    assert len(seen) == settings["chains"]


def array(n_rows, path=None):
    if path is None:
        X = np.empty((n_rows, D))
    else:
        X = np.memmap(path, float, "w+", shape=(n_rows, D))
    for part in np.array_split(X, max(1, n_rows // 10_000)):
        part[:] = np.random.default_rng(len(part)).standard_normal(part.shape)
    return X if path is None else np.memmap(path, float, "r", shape=X.shape)
"""

COPIES = """
if __name__ == "__main__":
    method, megabytes, cores, kind, path = sys.argv[1:]
    n_rows, settings = int(megabytes) * 10**6 // (8 * D), {"chains": int(cores), "cores": int(cores)}
    path = path if kind == "memmap" else None
    if kind == "values":
        shared_arrays.MIN_BYTES = float("inf")
    peaks = []
    for count in (100, n_rows):
        with Peak() as peak:
            sample(array(count, path), mp_ctx=method, **settings)
        peaks.append(peak.bytes)
    print((peaks[1] - peaks[0]) / (8 * D * n_rows))
"""


def run(script, tmp_path, *arguments):
    path = tmp_path / "script.py"
    path.write_text(MEMORY + textwrap.dedent(script))
    output = subprocess.run(
        [sys.executable, path, *map(str, arguments)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert output.returncode == 0, output.stderr
    return output.stdout.split()


@pytest.mark.process
@needs_proc
@pytest.mark.parametrize(
    ("method", "kind", "expected"),
    [
        ("fork", "array", 1),  # the model's own
        pytest.param("spawn", "array", 2, marks=pytest.mark.slow),  # one for all processes
        pytest.param("forkserver", "array", 2, marks=pytest.mark.slow),
        pytest.param("fork", "memmap", 0, marks=pytest.mark.slow),
        pytest.param("spawn", "memmap", 0, marks=pytest.mark.slow),
        pytest.param("forkserver", "memmap", 0, marks=pytest.mark.slow),
    ],
)
def test_copies_of_the_data(method, kind, expected, tmp_path):
    [copies] = run(COPIES, tmp_path, method, 200, 2, kind, tmp_path / "data")
    assert expected - 0.2 < float(copies) < expected + 0.5


@pytest.mark.slow
@needs_proc
def test_pickled_data_are_copied_for_each_process(tmp_path):
    [copies] = run(COPIES, tmp_path, "spawn", 200, 2, "values", tmp_path / "data")
    assert float(copies) > 3.8  # the model's, the pickle, and one for each process


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("method", "kind", "expected"),
    [
        ("fork", "array", 1),
        ("spawn", "array", 2),
        ("spawn", "memmap", 0),
        ("forkserver", "memmap", 0),
    ],
)
def test_copies_of_much_data_in_four_processes(method, kind, expected, tmp_path):
    [copies] = run(COPIES, tmp_path, method, 2000, 4, kind, tmp_path / "data")
    assert 2 * float(copies) < 2 * expected + 0.6  # GB above the interpreters' own


LIMITED = """
import resource


def used():
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sample(array(100), chains=1, cores=1)  # whatever is loaded and kept at the first time
    X = array(int(sys.argv[1]) * 10**6 // (8 * D))
    limit = used() + X.nbytes // 4
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sample(X, chains=int(sys.argv[2]), cores=int(sys.argv[2]), mp_ctx="fork")
    print("sampled")
    try:
        X[: len(X) // 2].copy()
    except MemoryError:
        print("full")
"""


@pytest.mark.process
@needs_proc
@pytest.mark.parametrize("cores", [1, 2])
def test_given_settings_need_no_memory_for_rows(cores, tmp_path):
    assert run(LIMITED, tmp_path, 400, cores) == ["sampled", "full"]


def test_a_step_method_is_pickled_without_its_data():
    X = numbers((2 * N, 2)) / 1e6
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=2)
        pm.Normal("y", pm.math.dot(X, beta), 1.0, observed=X @ [1.0, -1.0])
        step = SGHMC(batch_size=100, gradient="control_variates")
    # as the module of PyMC's that starts processes
    dumps = eval(
        "lambda step: dumps(step)",
        {"__name__": "pymc.sampling.parallel", "dumps": cloudpickle.dumps},
    )
    pickled = dumps(step)
    assert len(cloudpickle.dumps(step)) > X.nbytes  # any other pickle holds the data
    # arrays of 3 to 6 MB in the gradient, and pools of 2 to 7 MB in the anchor: what is left
    # is graphs, smaller than the smallest of them together
    assert len(pickled) < 2_000_000
    back = pickle.loads(pickled)
    arrays = (method.tuner.gradient.data.arrays for method in (step, back))
    for array, other in zip(*arrays, strict=True):
        np.testing.assert_array_equal(array, other)
        assert isinstance(other.base, np.memmap)
    orders = (method.tuner.gradients[1].order for method in (step, back))
    for pool, other in zip(*((o.pools[0], o.counts[0]) for o in orders), strict=True):
        np.testing.assert_array_equal(pool, other)
        assert isinstance(other.base, np.memmap)
    # the setup still holds for the data: it isn't found anew in each process
    back.begin_chain(np.random.default_rng(0))
    setup = back.tuner.setup
    assert back.tuner.setups.make(back.tuner.initial) is setup
    draws = []
    for method in (step, back):
        method.begin_chain(np.random.default_rng(1))
        draws.append(method.step(model.initial_point())[0]["beta"])
    np.testing.assert_array_equal(*draws)


def steps_of_three(model):
    """Both kinds that take handles, with large data used in part and whole, and one of PyMC's."""
    return [
        SGLD([model["beta"]], learning_rate=1e-6, gradient="plain", batch_size=100),
        GammaGibbs([model["tau"]]),
        pm.NUTS([model["alpha"]]),
    ]


@pytest.mark.parametrize(
    "make", [steps_of_three, lambda model: [QNHMC()]], ids=["handles", "values"]
)
def test_a_step_pickled_with_its_model_is_a_step_of_that_model(make):
    X = numbers((N, 2)) / 1e6
    with pm.Model() as model:
        beta, alpha = pm.Normal("beta", shape=2), pm.Normal("alpha")
        tau = pm.Gamma("tau", 1.0, 1.0)
        pm.Normal("y", pm.math.dot(X, beta), tau=tau, observed=X @ [1.0, -1.0] + X[::-1, 0])
        pm.Normal("z", alpha, observed=1.0)
        pair = model, make(model)
    draws = []
    for model, steps in (pair, cloudpickle.loads(cloudpickle.dumps(pair))):
        assert {v for step in steps for v in step.vars} == set(model.value_vars)
        idata = pm.sample(
            4, tune=4, chains=1, step=steps, model=model, random_seed=1,
            progressbar=False, compute_convergence_checks=False,
        )  # fmt: skip
        draws.append(idata.posterior)
    for name in ("alpha", "beta", "tau"):
        np.testing.assert_array_equal(draws[0][name], draws[1][name])
