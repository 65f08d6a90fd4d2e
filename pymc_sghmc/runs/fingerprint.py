"""What must be the same for a stored run to go on: its model, its data and its steps.

Knows graphs, arrays and files; no chains. Nothing is compiled or evaluated: ten million rows cost
as much as a thousand.
"""

import hashlib
import json
import os
import platform
import re

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import pymc as pm

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


Fingerprint = dict[str, Any]  # what JSON can hold


def fingerprint(
    model: pm.Model,
    step: Any,
    stored: Mapping[str, Any],
    coords: Mapping[str, np.ndarray],
    **numbers: int,
) -> Fingerprint:
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
    """
    arrays: dict[str, Any] = {}
    values = {v.name: [list(v.type.shape), v.dtype] for v in model.value_vars}
    graph = _graph_of_model(model, arrays)
    steps = {}
    for name, value in frozen(step.sampling_state).items():
        steps[name] = _setting(value, f"step, {name}", arrays)
    methods = getattr(step, "methods", [step])
    for i, method in enumerate(methods):
        steps[f"{i}: step" if len(methods) > 1 else "step"] = type(method).__name__
        for k, array in enumerate(getattr(method, "arrays", ())):
            arrays[f"step {i}, rows' array {k}, shape {np.shape(array)}"] = np.asarray(array)
    versions = {name: version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "machine": platform.machine()}
    return {
        "numbers": numbers,
        "unknowns": values,
        "model": graph,
        "stored": json.loads(json.dumps(stored)),
        "coords": {name: _bytes(values) for name, values in coords.items()},
        "data": {name: _array(array) for name, array in arrays.items()},
        "step": steps,
        "versions": versions,
    }


def different(stored: Fingerprint, new: Fingerprint) -> str:
    """Return the first difference between two runs, for an error; nothing if they are the same.

    Times of files and versions may differ.
    """
    return next(_differences(stored, new), "")


def _differences(stored: Fingerprint, new: Fingerprint) -> Iterator[str]:
    """Yield what differs, the causes before what follows from them."""
    for name, old, now in _others(stored, new, "numbers"):
        yield f"{name}={now}, but the stored run has {name}={old}"
    for name, old, now in _others(stored, new, "unknowns", "none"):
        yield f"the model's parameter {name} is {now}, but {old} in the stored run (shape, dtype)"
    of_steps = _others(stored, new, "step", "none")
    for name, old, now in sorted(of_steps, key=lambda other: _is_setting(other[0])):
        what = f"the step's {name.rpartition(': ')[2]}" if _is_setting(name) else "the step"
        yield f"{what} is {now}, but {old} in the stored run"
    for name, old, now in _others(stored, new, "stored", "not stored"):
        yield f"{name} is {now}, but {old} in the stored run (var_names, or shape, dtype and dims)"
    for name, *_ in _others(stored, new, "coords"):
        yield f"the coordinates {name!r} aren't those of the stored run"
    if stored["model"] != new["model"]:
        same = stored["versions"] == new["versions"]
        cause = "" if same else ". Another version of PyMC or PyTensor may be the cause"
        yield (
            "the model has another prior, likelihood, Deterministic or constant than that of the "
            f"stored run{cause}"
        )
    for name, old, now in _others(stored, new, "data", {}):
        if what := _difference_of_data(name, old, now):
            yield what


def _difference_of_data(name: str, old: dict[str, Any], now: dict[str, Any]) -> str:
    if not old or not now:
        has, none = ("stored run", "model") if old else ("model", "stored run")
        return f"the {has} has data in {name}, and the {none} has none there"
    where = f" (file {now['file']})" if "file" in now else ""
    for what in ("another shape", "another dtype", "other bytes"):
        key = what.split()[-1]
        if old.get(key) != now.get(key):
            return f"the data in {name}{where} have {what} than those of the stored run"
    return ""  # of a file that was written anew, with the same data


def _is_setting(name: str) -> bool:
    """Whether it is a setting of a step, not the step itself."""
    return name != "step" and not name.endswith(": step")


def _others(
    stored: Fingerprint, new: Fingerprint, part: str, nothing: Any = None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs in a part of two fingerprints: its name, and both values."""
    for name in sorted(stored[part].keys() | new[part].keys()):
        old, now = (x[part].get(name, nothing) for x in (stored, new))
        if old != now:
            yield name, old, now


def _setting(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Return a setting as JSON; data go to the arrays, of other objects the type counts."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {str(k): _setting(v, f"{name} {k!r}", arrays) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return "an array"
    inside: dict[str, Any] = {}
    try:
        text = encoded(value, inside)
    except TypeError:
        return f"a {type(value).__qualname__}"
    arrays |= {f"{name}, {key}": x for key, x in inside.items()}
    plain: Any = json.loads(json.dumps(text))
    return plain


def _graph_of_model(model: pm.Model, arrays: dict[str, Any]) -> str:
    """Return the checksum of the graphs of the log-density and of what is derived."""
    with np.errstate(all="ignore"):
        terms = model.logp(sum=False)
    derived = model.deterministics
    checksum = _graph(terms + model.replace_rvs_by_values(derived), arrays)
    return " ".join([checksum, *(variable.name for variable in derived)])


def _graph(outputs: list[Any], arrays: dict[str, Any]) -> str:
    """Return the checksum of a graph's operations; arrays that it holds are added to ``arrays``."""
    numbers: dict[Any, int] = {}
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


def _operation(op: Any, arrays: dict[str, Any]) -> str:
    """Name an operation and the graph in it, as of ``scan``; its data go to ``arrays``."""
    for name, value in sorted(getattr(op, "__dict__", {}).items()):
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            arrays[f"array {len(arrays)}, {type(op).__name__}.{name}"] = value
    inner = getattr(op, "inner_outputs", None)
    return ADDRESS.sub("", str(op)) + (_graph(list(inner), arrays) if inner else "")


def _leaf(variable: Any, name: str, arrays: dict[str, Any]) -> str:
    value: Any
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


def _add(arrays: dict[str, Any], name: str, value: Any) -> None:
    """Add an array under its name, or, where another has it, under another name."""
    while arrays.get(name, value) is not value:
        name += " (another)"
    arrays[name] = value


def _array(array: Any) -> dict[str, Any]:
    """Return shape, dtype, a checksum of some bytes, and the size and time of an array's file."""
    array = np.ma.getdata(array)
    marks = {"shape": list(array.shape), "dtype": array.dtype.str, "bytes": _bytes(array)}
    memory_map = memory_map_of(array)
    filename = "" if memory_map is None else os.fspath(memory_map.filename or "")
    if os.path.exists(filename):
        stat = os.stat(filename)
        marks |= {"file": filename, "size": stat.st_size, "time": stat.st_mtime_ns}
    return marks


def _bytes(array: Any) -> str:
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
