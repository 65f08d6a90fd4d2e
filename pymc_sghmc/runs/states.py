"""States of step methods as arrays and JSON, and back, without pickles.

Knows dataclasses, named tuples and arrays; no step and no file.
"""

import importlib

from dataclasses import Field, fields, is_dataclass
from typing import Any

import numpy as np

__all__ = ["decoded", "encoded", "frozen"]

PACKAGES = "pymc", "pymc_sghmc"
PLAIN = bool | int | float | str | None


def frozen(state: Any) -> dict[str, Any]:
    """Return what a state says of its step's settings, by name: PyMC compares these."""
    if hasattr(state, "methods"):
        parts = [frozen(method) for method in state.methods]
        return {f"{i}: {name}": x for i, part in enumerate(parts) for name, x in part.items()}
    kept = {f.name: getattr(state, f.name) for f in fields(state) if _is_frozen(f)}
    settings = kept.pop("settings", {})
    return {"step": type(state).__name__, **kept, **settings}


def encoded(value: Any, arrays: dict[str, Any]) -> Any:
    """Return what JSON can hold of a value; its arrays are added to ``arrays``.

    Settings, which PyMC's states hold as frozen fields, are left out: they are the new step's.

    Raises
    ------
    TypeError
        If there is something else in it than numbers, texts, arrays, lists, dicts, dataclasses and
        named tuples.
    """
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise TypeError("an array of objects can't be stored")
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {"array" if isinstance(value, np.ndarray) else "number": name}
    if isinstance(value, PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if not _is_frozen(f)]
        return _of_class(value, names, arrays)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _of_class(value, value._fields, arrays)
    if isinstance(value, list | tuple):
        return {type(value).__name__: [encoded(x, arrays) for x in value]}
    if type(value) is dict:
        return {"dict": [[encoded(k, arrays), encoded(v, arrays)] for k, v in value.items()]}
    raise TypeError(f"a {type(value).__qualname__} can't be stored")


def decoded(stored: Any, arrays: dict[str, Any], own: Any = None) -> Any:
    """Return the value of which `encoded` made this.

    Parameters
    ----------
    stored
        What JSON held of it.
    arrays : dict
        Its arrays.
    own
        The state of the step that is to take it up; settings are taken from it.

    Raises
    ------
    ValueError
        If it names a class that isn't a dataclass or named tuple of PyMC or of this package.
    """
    if not isinstance(stored, dict):
        return stored
    if "of" in stored:
        return _made(_class_of(stored["of"]), stored["fields"], arrays, own)
    [(kind, value)] = stored.items()
    if kind in ("array", "number"):
        return arrays[value] if kind == "array" else arrays[value][()]
    if kind == "dict":
        pairs = [(decoded(k, arrays), v) for k, v in value]
        at = own.get if isinstance(own, dict) else lambda _: None
        return {k: decoded(v, arrays, at(k)) for k, v in pairs}
    if kind not in ("list", "tuple"):
        raise ValueError(f"a stored state has a {kind!r} in it")
    owns = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
    values = [decoded(x, arrays, o) for x, o in zip(value, owns, strict=True)]
    return values if kind == "list" else tuple(values)


def _is_frozen(field: Field[Any]) -> bool:
    return bool(field.metadata.get("frozen", False))


def _of_class(value: Any, names: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    cls = type(value)
    return {
        "of": f"{cls.__module__}:{cls.__qualname__}",
        "fields": {name: encoded(getattr(value, name), arrays) for name in names},
    }


def _class_of(name: str) -> type:
    module, _, qualname = name.partition(":")
    if module.split(".")[0] in PACKAGES:
        try:
            cls = getattr(importlib.import_module(module), qualname, None)
        except ImportError:
            cls = None
        if isinstance(cls, type) and (is_dataclass(cls) or hasattr(cls, "_fields")):
            return cls
    raise ValueError(f"a stored state is of {name}, which this version of the package doesn't have")


def _names(cls: Any) -> set[str]:
    """Names of all fields."""
    return set(cls._fields) if hasattr(cls, "_fields") else {field.name for field in fields(cls)}


def _stored(cls: Any) -> set[str]:
    """Names of the fields that are stored."""
    return {field.name for field in fields(cls) if not _is_frozen(field)}


def _made(cls: type, stored: dict[str, Any], arrays: dict[str, Any], own: Any) -> Any:
    is_tuple = hasattr(cls, "_fields")
    needed = set() if is_tuple else _stored(cls)
    if not needed <= set(stored) <= _names(cls):
        raise ValueError(
            f"a stored state is of a {cls.__name__} of another version of the package, with other "
            "fields. Go on with that version, or begin a new run"
        )
    values = {k: decoded(v, arrays, getattr(own, k, None)) for k, v in stored.items()}
    if is_tuple:
        return cls(**values)
    made: Any = object.__new__(cls)
    for field in fields(made):
        value = getattr(own, field.name) if _is_frozen(field) else values[field.name]
        object.__setattr__(made, field.name, value)
    return made
