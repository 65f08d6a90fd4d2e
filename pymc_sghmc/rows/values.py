"""From what a user passes for a container of the model to an array of numbers, or a refusal.

No library is imported for an object that may come from it: objects are read by the protocols that
they have, ``__array__`` most of all. Knows containers and values; no loaders, no rows of a chain.
"""

import os
import warnings

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from pymc_sghmc.checks import quoted
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.containers import Container, StreamError, column_names

__all__ = ["array_for", "first_changed", "refuse_other_lengths", "rows_first"]

CHUNK = 2**20  # entries looked at together
ROWS_IN_CACHE = 2**12  # of a frame, copied together: whole columns take four times as long
NUMBERS = {"boolean": bool, "integer": np.int64, "floating": float, "mixed-integer-float": float}
NUMBERS |= {"decimal": float}  # kinds of objects, as pandas names them


def array_for(
    container: Container, value: Any, where: str = "data=:", check_values: bool = True
) -> Array:
    """Return an array of numbers that can take the place of what a container holds.

    Arrays of numbers are returned as they are. All else is copied, once.

    Parameters
    ----------
    container : Container
    value : array-like or frame
    where : str, default "data=:"
        How a message begins.
    check_values : bool, default True
        Whether to look for missing values, and for such as the container's type can't hold.

    Raises
    ------
    StreamError
        If there is none.
    """
    what = f"{where} {container.name!r}"
    names = column_names(value)
    if names is not None:
        array = _stacked(container, what, value, names)
    else:
        array = _plain(what, value, container)
        # what lies in a file isn't read to look for NaN: passes of a set-up find it
        looks = check_values and not isinstance(array, np.memmap)
        array = _without_missing(what, array, container.columns, looks)
        array = _numbers(container, what, array)
    if array.ndim == 0:
        raise StreamError(f"{what} is a single number. Pass an array with an entry for each row")
    if array.ndim != len(container.shape) or array.shape[1:] != container.shape[1:]:
        raise StreamError(
            f"{what} has shape {array.shape}, but rows of shape {container.shape[1:]} in the "
            f"model. Build the model with a few of these rows{_reshaped(container, array)}"
        )
    if check_values:
        _warn_of_missing_codes(container, what, array)
        changed = first_changed(array, container.dtype)
        if changed is not None:
            raise StreamError(
                f"{what} has the value {changed}, which the model's container of {container.dtype} "
                f"can't hold. Build it with pm.Data({container.name!r}, rows.astype(float)), or "
                "pass values that fit"
            )
    return array


def _warn_of_missing_codes(container: Container, what: str, array: Array) -> None:
    """Warn of -1 as the only negative value, by which pandas marks a missing category."""
    if container.dtype.kind != "i" or isinstance(array, np.memmap) or not array.size:
        return
    if array.min() == -1:
        count = int((array == -1).sum())
        warnings.warn(
            f"{what} has the value -1 in {count} rows. As a code, which column.cat.codes gives to "
            "missing values, it would count as the last group: drop such rows. If these are "
            "numbers, build the container with floats.",
            UserWarning,
            stacklevel=2,
        )


def first_changed(array: Array, dtype: np.dtype) -> Any:
    """Return the first value that a cast to ``dtype`` changes but by rounding; None if none is."""
    if dtype.kind == "f" or np.can_cast(array.dtype, dtype, "safe"):
        return None
    for chunk in _chunks(array):
        with np.errstate(invalid="ignore"):
            wrong = chunk.astype(dtype) != chunk
        if wrong.any():
            return chunk[wrong][0]
    return None


def _chunks(array: Array) -> Any:
    step = max(1, CHUNK * len(array) // max(1, array.size))
    return (array[start : start + step] for start in range(0, len(array), step))


def _reshaped(container: Container, array: Array) -> str:
    """Advise on an array of one column in place of a vector, or the other way round."""
    if array.ndim == 2 and array.shape[1] == 1 and len(container.shape) == 1:
        return ', or pass a vector: array[:, 0], or frame["name"] of a frame'
    if array.ndim == 1 and container.shape[1:] == (1,):
        return ', or pass one column: array[:, None], or frame[["name"]] of a frame'
    return ""


def _in_order_of_labels(what: str, names: list[Any], labels: Sequence[Any]) -> list[Any]:
    """Return names of columns in the order of a container's labels, if they are these.

    Wholly other names are taken by position. Names of which some agree are refused: one that is
    misspelled would let all change places.
    """
    if not labels or not names:
        return names
    if len(names) == len(labels) and set(names) == set(labels):
        return list(labels)
    alike = {str(label).strip().lower() for label in labels}
    if any(str(name).strip().lower() in alike for name in names):
        missing = [label for label in labels if label not in names]
        other = [name for name in names if name not in labels]
        raise StreamError(
            f"{what} has columns of which some are labels of its coords: labels without a column "
            f"are {missing}, columns without a label {other}. Give columns and coords the same "
            "names, or pass an array, whose columns are in the order of the labels"
        )
    return names


def _plain(what: str, value: Any, container: Container | None = None) -> Any:
    """Return any form of array as NumPy's, or as pandas' if it is categorical."""
    if hasattr(value, "tocsr"):
        raise StreamError(
            f"{what} is a sparse array, of which no rows can be drawn. Pass value.toarray()"
        )
    if isinstance(value, xr.DataArray) and container is not None:
        value = _in_order_of_container(what, value, container)
    if isinstance(getattr(value, "dtype", None), pd.CategoricalDtype):
        return value
    if isinstance(value, np.ndarray):
        return value
    try:
        if isinstance(value, list | tuple) or hasattr(value, "__array__"):
            return np.asarray(value)
        if hasattr(value, "__array_interface__"):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    except Exception as error:
        raise StreamError(f"{what} can't be read as an array: {error}") from error
    raise StreamError(
        f"{what} is of type {type(value).__name__}. Pass an array, or a column of a data frame"
    )


def refuse_other_lengths(
    arrays: Mapping[str, Array], originals: Mapping[str, Any], where: str
) -> None:
    """Refuse arrays with different numbers of rows; a message names the files of the originals."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(
            f"{name!r} has {n}{_filename(originals.get(name))}" for name, n in lengths.items()
        )
        raise StreamError(f"{where} the arrays have different numbers of rows: {counts}")


def _filename(array: Any) -> str:
    filename = getattr(array, "filename", None)
    return f" (file {os.fspath(filename)})" if filename is not None else ""


def rows_first(container: Container | None, value: Any) -> Any:
    """Return an array of xarray with its dims in the order of a container's; else the value."""
    if container is None or not isinstance(value, xr.DataArray):
        return value
    return value.transpose(*container.dims) if set(value.dims) == set(container.dims) else value


def _in_order_of_container(what: str, value: xr.DataArray, container: Container) -> xr.DataArray:
    """Return an array of xarray with its dims and its labels in the order of a container's."""
    value = rows_first(container, value)
    if value.ndim == 2 and value.dims[1] in value.indexes:
        labels = value.indexes[value.dims[1]].tolist()
        order = _in_order_of_labels(what, labels, container.columns)
        if order != labels:
            value = value.sel({value.dims[1]: order})
    return value


def _stacked(container: Container, what: str, frame: Any, names: list[Any]) -> Array:
    """Return the columns of a frame as a matrix, in the order of the container's labels."""
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise StreamError(f"{what}: two columns of the frame are named {twice[0]!r}. Rename one")
    names = _in_order_of_labels(what, names, container.columns)
    columns = {name: _plain(f"{what}, column {name!r},", frame[name]) for name in names}
    _refuse_missing(what, {name: _n_missing(column) for name, column in columns.items()})
    arrays = [
        _numbers(container, f"{what}, column {name!r},", column) for name, column in columns.items()
    ]
    if not arrays:
        return np.empty((len(frame), 0))
    for name, array in zip(names, arrays, strict=True):
        if array.ndim != 1:
            raise StreamError(
                f"{what}, column {name!r}, has entries of shape {array.shape[1:]}. Write one "
                "column for each number"
            )
    out = np.empty((len(arrays[0]), len(arrays)), np.result_type(*arrays))
    for start in range(0, len(out), ROWS_IN_CACHE):
        for j, array in enumerate(arrays):
            out[start : start + ROWS_IN_CACHE, j] = array[start : start + ROWS_IN_CACHE]
    return out


def _n_missing(column: Any) -> int:
    return int(pd.isna(column).sum())


def _without_missing(what: str, array: Any, columns: Sequence[Any], looks_for_nan: bool) -> Any:
    """Return an array without a mask; refuse one with missing values."""
    if not isinstance(array, np.ndarray):  # categorical
        _refuse_missing(what, {0: _n_missing(array)})
        return array
    if np.ma.isMaskedArray(array):
        mask = np.ma.getmaskarray(array)
        _refuse_missing(what, _by_column(mask.sum(axis=0), columns))
        array = np.ma.getdata(array)
    kinds = "OmMf" if looks_for_nan else "OmM"
    if array.dtype.kind in kinds and array.ndim:
        counts = np.zeros(array.shape[1:], int)
        for chunk in _chunks(array):
            counts = counts + pd.isna(chunk).sum(axis=0)
        _refuse_missing(what, _by_column(counts, columns))
    return array


def _by_column(counts: Any, columns: Sequence[Any]) -> dict[Any, int]:
    """Return counts of missing values by the names of columns, or by their numbers."""
    counts = np.ravel(counts).tolist()
    names = columns if len(columns) == len(counts) else range(len(counts))
    return dict(zip(names, counts, strict=True))


def _refuse_missing(what: str, counts: Mapping[Any, int]) -> None:
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return
    listed = ", ".join(f"{count} in column {name!r}" for name, count in found.items())
    if len(counts) == 1:
        listed = str(next(iter(found.values())))
    raise StreamError(
        f"{what} has missing values ({listed}). Drop these rows of all arrays before the model is "
        "built, such as by frame = frame.dropna(), or impute them"
    )


def _numbers(container: Container, what: str, array: Any) -> Array:
    """Return numbers of native types: those of text are its places among the model's labels."""
    if not isinstance(array, np.ndarray):
        array = _from_categories(container, what, array)
    if array.dtype.kind == "O":
        array = _from_objects(container, what, array)
    if array.dtype.kind in "SUT":
        array = _places(container, what, array)
    if array.dtype.kind in "mM":
        raise StreamError(
            f"{what} holds dates or times ({array.dtype}). Convert them to numbers, such as "
            '(t - t.min()) / np.timedelta64(1, "D")'
        )
    if array.dtype.kind not in "biuf":
        raise StreamError(f"{what} has dtype {array.dtype}, which no container of a model holds")
    if array.dtype.itemsize not in (1, 4, 8) and array.dtype.kind == "f":
        return array.astype("f4" if array.dtype.itemsize == 2 else "f8")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _from_categories(container: Container, what: str, column: Any) -> Array:
    categories = column.dtype.categories
    if not pd.api.types.is_numeric_dtype(categories):
        return _places(container, what, column)
    raise StreamError(
        f"{what} is categorical, with numbers as categories. Pass column.cat.codes for "
        "codes from 0 on, or column.astype(float) for the numbers themselves"
    )


def _from_objects(container: Container, what: str, array: Array) -> Array:
    if array.size == 0:
        return np.zeros(array.shape)
    kind = pd.api.types.infer_dtype(array.ravel())
    if kind == "string":
        return _places(container, what, array)
    if kind not in NUMBERS:
        raise StreamError(
            f"{what} holds objects ({_examples(array)}), not numbers. Convert them, such as "
            "lists to a column for each entry and dates to days since the first one"
        )
    try:
        return array.astype(NUMBERS[kind])
    except OverflowError as error:
        raise StreamError(f"{what} holds a number that 64 bits can't hold: {error}") from error


def _examples(array: Array) -> str:
    return f"{array.ravel()[0]!r}"[:40] if array.size else "none"


def _places(container: Container, what: str, labels: Any) -> Array:
    """Return the places of text among the labels of one of the model's coords."""
    if np.ndim(labels) != 1:
        raise StreamError(f"{what} holds text ({_examples(labels)}), not numbers. Convert it")
    numbers, unique = pd.factorize(labels)
    unique = np.asarray(unique)
    if not len(unique):
        return numbers
    found = {}
    if container.dtype.kind in "iu":
        places = {dim: index.get_indexer(unique) for dim, index in container.labels.items()}
        found = {dim: place for dim, place in places.items() if (place >= 0).all()}
        for dim, place in places.items():
            if not found and (place >= 0).any():
                unknown = quoted(str(label) for label in unique[place < 0][:5])
                raise StreamError(
                    f"{what} holds text, of which {unknown} is no label of the model's coords "
                    f"{dim!r}. Correct it, drop such rows, or add it to the coords"
                )
    kinds = {place.tobytes(): place for place in found.values()}
    if len(kinds) == 1:
        return next(iter(kinds.values()))[numbers]
    if kinds:
        raise StreamError(
            f"{what} holds text that several coords of the model have as labels: "
            f"{quoted(found)}. Pass codes, such as column.cat.codes"
        )
    examples = quoted(str(label) for label in unique[:3])
    raise StreamError(
        f"{what} holds text ({examples}), but {container.dtype} in the model. For groups, build "
        "the container with whole numbers and give the model coords with these labels, or pass "
        "codes, such as column.cat.codes. Else convert it to numbers"
    )
