"""The loop around an inner step, compiled by Numba, and how it fetches the rows of a minibatch.

Rows lie anywhere in memory, and waiting for them takes half of a step of logistic regression: the
loop asks for each a few rows ahead. Imported where the backend is Numba, which it needs.
"""

import math

from hashlib import sha256
from pathlib import Path

import numpy as np

from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache, numba_njit

__all__ = ["numba_loop"]

# a loop of other code isn't taken from the cache on disk, nor one of a module that has moved since:
# Numba imports the module by its name when it loads what it kept
THIS_FILE = f"{__name__}\n{Path(__file__).read_text()}"
AHEAD = 8  # rows
LINE = 64  # bytes that a processor fetches at a time

# not isfinite of a sum of both: LLVM may reorder sums here, and takes its x − x apart
SOURCE = """
def inner_loop(state, normals, rows, fixed):
    virial = square_norm = kinetic = logp = 0.0
    for t in range(normals.shape[0]):
        new = step(*state, normals[t], {inputs}*fixed)
        sums = new[{n}]
        if not (isfinite(sums[0]) and isfinite(sums[3])):
            return state, t, virial, square_norm, kinetic, logp
        state = new[:{n}]
        virial += sums[0]
        square_norm += sums[1]
        kinetic += sums[2]
        logp = sums[3]
    return state, normals.shape[0], virial, square_norm, kinetic, logp
"""


@intrinsic
def prefetch(typing, array, offset):
    """Ask for the cache line so many bytes from where an array begins."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.gep(builder.bitcast(data, pointer), [args[1]])
        builder.call(function, [address, number(0), number(3), number(1)])  # to read and keep
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@njit
def gather_1(array, rows, dtype):
    """``array[rows]`` of a vector."""
    n = rows.size
    out = np.empty(n, dtype)
    for i in range(n):
        prefetch(array, rows[min(i + 2 * AHEAD, n - 1)] * array.strides[0])
        out[i] = array[rows[i]]
    return out


@njit
def gather_2(array, rows, dtype):
    """``array[rows]`` of a matrix."""
    n = rows.size
    d = array.shape[1]
    out = np.empty((n, d), dtype)
    width = d * array.strides[1] if array.strides[1] == array.itemsize else 0
    for i in range(n):
        ahead = rows[min(i + AHEAD, n - 1)] * array.strides[0]
        for start in range(0, width, LINE):
            prefetch(array, ahead + start)
        row = rows[i]
        for j in range(d):
            out[i, j] = array[row, j]
    return out


@njit
def gather_any(array, rows, dtype):
    """``array[rows]``."""
    return array[rows].astype(dtype)


def numba_loop(function, n_state: int, n_rows: int, gathers: list):
    """Compile the loop; it is cached where PyTensor caches the step, under a key from the step's.

    Parameters
    ----------
    function : compiled step
    n_state, n_rows : int
        Arrays in the state, and groups of rows.
    gathers : list of (int, int, int, str)
        For each batch that the step takes: its place among the fixed inputs, its group of rows,
        how many axes it has, and its dtype.
    """
    step, key = numba_funcify_ensure_cache(function.maker.fgraph)
    batches = [
        f"gather_{ndim if ndim in (1, 2) else 'any'}(fixed[{i}], rows[{k}][t], {dtype}_), "
        for i, k, ndim, dtype in gathers
    ]
    rows = [f"rows[{k}][t], " for k in range(n_rows)]
    source = SOURCE.format(n=n_state, inputs="".join(batches + rows))
    names = {
        "__name__": __name__,
        "step": step,
        "isfinite": math.isfinite,
        "gather_1": gather_1,
        "gather_2": gather_2,
        "gather_any": gather_any,
        **{f"{dtype}_": np.dtype(dtype).type for *_, dtype in gathers},
    }
    cache_key = None
    if key is not None:
        cache_key = sha256(f"{THIS_FILE}{n_state} {n_rows} {gathers} {key}".encode()).hexdigest()
    loop = compile_numba_function_src(source, "inner_loop", names, cache_key=cache_key)
    return numba_njit(loop, final_function=True, cache=key is not None)
