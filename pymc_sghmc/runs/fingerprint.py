"""Marks by which a stored run knows its model, its data and its steps again.

Knows graphs, arrays and files; no chains. Nothing is compiled or evaluated: ten million rows cost
as much as a thousand.
"""

import hashlib
import json
import os
import platform
import re

from importlib.metadata import version

import numpy as np

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from scipy.sparse import issparse

from pymc_sghmc.memory import memory_map_of
from pymc_sghmc.runs.states import encoded, frozen

__all__ = ["different", "fingerprint"]

SAMPLED = 2**20  # bytes of an array that are looked at, at most, and pieces of it
PIECES = 256
PACKAGES = "pymc", "pytensor", "numpy", "pymc-sghmc"
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def fingerprint(model, step, stored, coords, **numbers) -> dict:
    """Return what must be the same for a chain to go on: numbers, graph, data and settings.

    Parameters
    ----------
    model : pm.Model
    step : step method
    stored : dict
        Of variables that are stored, with their shapes, types and dims.
    coords : dict of {str: array}
    **numbers
        Of the run, such as ``draws``.

    Returns
    -------
    dict
        Of what JSON can hold.
    """
    arrays = {}
    values = {v.name: [list(v.type.shape), v.dtype] for v in model.value_vars}
    with np.errstate(all="ignore"):
        terms = model.logp(sum=False)
    derived = model.deterministics
    graph = _graph(terms + model.replace_rvs_by_values(derived), arrays)
    graph += " ".join(["", *(variable.name for variable in derived)])
    steps = {}
    for name, value in frozen(step.sampling_state).items():
        steps[name] = _setting(value, f"step, {name}", arrays)
    methods = getattr(step, "methods", [step])
    for i, method in enumerate(methods):
        steps[f"{i}: step" if len(methods) > 1 else "step"] = type(method).__name__
        for k, array in enumerate(getattr(method, "arrays", ())):
            arrays[f"step {i}, rows' array {k}, shape {np.shape(array)}"] = np.asarray(array)
    return {
        "numbers": numbers,
        "unknowns": values,
        "model": graph,
        "stored": json.loads(json.dumps(stored)),
        "coords": {name: _bytes(values) for name, values in coords.items()},
        "data": {name: _array(array) for name, array in arrays.items()},
        "step": steps,
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version(), "machine": platform.machine()},
    }


def different(stored, new) -> str:
    """Say what of a run is another, in words for an error; nothing if it is the same.

    Times of files and versions may be others.
    """
    for name, old, now in _others(stored, new, "numbers"):
        return f"{name}={now}, and the run in it has {name}={old}"
    for name, old, now in _others(stored, new, "unknowns", "none"):
        return f"the model's unknown {name} is {now}, and in the run {old} (shape, dtype)"
    of_steps = _others(stored, new, "step", "none")
    for name, old, now in sorted(of_steps, key=lambda found: _is_setting(found[0])):
        what = f"the step's {name.rpartition(': ')[2]}" if _is_setting(name) else "the step"
        return f"{what} is {now}, and in the run {old}"
    for name, old, now in _others(stored, new, "stored", "not stored"):
        return f"{name} is {now}, and in the run {old} (var_names, or shape, dtype and dims)"
    for name, *_ in _others(stored, new, "coords"):
        return f"the coordinates {name!r} aren't those of the run"
    if stored["model"] != new["model"]:
        return (
            "the model has another prior, likelihood, Deterministic or constant than that of the "
            "run"
            + (
                ""
                if stored["versions"] == new["versions"]
                else ", or other versions of PyMC or PyTensor write it so"
            )
        )
    for name, old, now in _others(stored, new, "data", {}):
        if not old or not now:
            has, none = ("the run", "the model") if old else ("the model", "the run")
            return f"{has} has data in {name}, and {none} has none there"
        for what in ("another shape", "another dtype", "other bytes"):
            if old.get(key := what.split()[-1]) != now.get(key):
                where = f" (file {now['file']})" if "file" in now else ""
                return f"the data in {name}{where} have {what} than those of the run"
    return ""


def _is_setting(name) -> bool:
    """Whether it is a setting of a step, not the step itself."""
    return name != "step" and not name.endswith(": step")


def _others(stored, new, part, nothing=None):
    """Yield what differs in a part of two fingerprints: its name, and both values."""
    for name in sorted(stored[part].keys() | new[part].keys()):
        old, now = (x[part].get(name, nothing) for x in (stored, new))
        if old != now:
            yield name, old, now


def _setting(value, name, arrays):
    """Return a setting as JSON; data go to the arrays, and of what can't be stored its type counts."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {str(k): _setting(v, f"{name} {k!r}", arrays) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return "an array"
    inside = {}
    try:
        text = encoded(value, inside)
    except TypeError:
        return f"a {type(value).__qualname__}"
    arrays |= {f"{name}, {key}": x for key, x in inside.items()}
    return json.loads(json.dumps(text))


def _graph(outputs, arrays) -> str:
    """Return the checksum of a graph's operations; arrays that it holds are added to ``arrays``."""
    numbers = {}
    digest = hashlib.blake2b(digest_size=16)
    todo = list(reversed(outputs))
    while todo:
        variable = todo[-1]
        if variable in numbers:
            todo.pop()
            continue
        node = variable.owner
        inputs = [] if node is None else node.inputs
        if missing := [x for x in reversed(inputs) if x not in numbers]:
            todo += missing
            continue
        todo.pop()
        numbers[variable] = len(numbers)
        words = [str(numbers[x]) for x in inputs]
        if node is None:
            words.append(_leaf(variable, f"array {len(arrays)}", arrays))
        else:
            words += [_operation(node.op, arrays), str(node.outputs.index(variable))]
        digest.update("|".join([str(variable.type), *words, "\n"]).encode())
    digest.update(str([numbers[x] for x in outputs]).encode())
    return digest.hexdigest()


def _operation(op, arrays) -> str:
    """Name an operation, with the graph in it, as of ``scan``; data that it holds go to ``arrays``."""
    for name, value in sorted(getattr(op, "__dict__", {}).items()):
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            arrays[f"array {len(arrays)}, {type(op).__name__}.{name}"] = value
    inner = getattr(op, "inner_outputs", None)
    return ADDRESS.sub("", str(op)) + (_graph(list(inner), arrays) if inner else "")


def _leaf(variable, name, arrays) -> str:
    if isinstance(variable, SharedVariable):
        value = variable.get_value(borrow=True)
    elif isinstance(variable, Constant):
        value = variable.data
    else:
        return str(variable.name)
    if isinstance(value, np.ndarray | np.generic) and value.size < 2 and not value.dtype.hasobject:
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        _add(arrays, variable.name or f"{name} of the model, shape {value.shape}", value)
        return "array"
    if issparse(value):
        parts = value.tocoo()
        for part in ("data", "row", "col"):
            _add(arrays, f"{variable.name or name}, {part} of a sparse one", getattr(parts, part))
        return f"sparse {value.format} {value.shape}"
    if isinstance(value, np.random.Generator):
        return "generator"
    return ADDRESS.sub("", f"{type(value).__name__} {value}")


def _add(arrays, name, value):
    """Add an array under its name, or, where another has it, under another name."""
    while arrays.get(name, value) is not value:
        name += " (another)"
    arrays[name] = value


def _array(array) -> dict:
    """Return shape, dtype and a checksum of some bytes of an array, and of its file size and time."""
    array = np.ma.getdata(array)
    marks = {"shape": list(array.shape), "dtype": array.dtype.str, "bytes": _bytes(array)}
    memory_map = memory_map_of(array)
    if memory_map is not None and os.path.exists(memory_map.filename):
        stat = os.stat(memory_map.filename)
        filename = os.fspath(memory_map.filename)
        marks |= {"file": filename, "size": stat.st_size, "time": stat.st_mtime_ns}
    return marks


def _bytes(array) -> str:
    """Return a checksum: of all of a small array, of pieces spread over a large one."""
    digest = hashlib.blake2b(digest_size=16)
    if array.nbytes <= SAMPLED or array.ndim == 0:
        digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
    row = max(1, array.nbytes // len(array))
    count = max(2, min(len(array), SAMPLED // row))
    rows = np.linspace(0, len(array) - 1, min(count, PIECES)).astype(np.int64)
    piece = max(1, count // rows.size)
    for start in rows:
        digest.update(np.ascontiguousarray(array[start : start + piece]).tobytes())
    return digest.hexdigest()
