"""The loop around an inner step, compiled by Numba, and how it fetches the rows of a minibatch.

The rows of a minibatch lie anywhere in memory, and waiting for them takes half the time of a step
of logistic regression. Therefore the loop asks the processor for each row a few rows ahead. This
file needs Numba, and is imported only if that is PyTensor's backend.
"""

import ast
import math

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import numba_funcify_and_cache_key, numba_njit

from pymc_sghmc.loops.backends import CompiledStep
from pymc_sghmc.protocols import Array

__all__ = ["numba_loop"]

# Part of the cache's key: a loop made from other code, or from a module that has been renamed, is
# not taken from the cache. (Numba imports the module by its name when it loads a stored loop.)
THIS_FILE = f"{__name__}\n{Path(__file__).read_text()}"
AHEAD = 8  # rows
LINE = 64  # bytes that a processor fetches at a time
MOST_IN_A_TUPLE = 20  # from 31 elements on Python makes a list first, which Numba can't inline

# Virial and log-density are tested one by one. The sum of both would not do: LLVM may reorder sums
# in this code, and then the test of x − x for NaN is lost.
SOURCE = """
def inner_loop(state, normals, rows, fixed):
    virial = square_norm = kinetic = logp = 0.0
    for t in range(normals.shape[0]):
        new = step({inputs})
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


def _prefetch(typing: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line that is ``offset`` bytes behind the start of an array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.gep(builder.bitcast(data, pointer), [args[1]])
        builder.call(function, [address, number(0), number(3), number(1)])  # to read and keep
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Any = intrinsic(_prefetch)


@njit
def gather_1(array: Array, rows: Array, dtype: Any) -> Array:
    """``array[rows]`` of a vector."""
    n = rows.size
    out = np.empty(n, dtype)
    for i in range(n):
        prefetch(array, rows[min(i + 2 * AHEAD, n - 1)] * array.strides[0])
        out[i] = array[rows[i]]
    return out


@njit
def gather_2(array: Array, rows: Array, dtype: Any) -> Array:
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
def gather_any(array: Array, rows: Array, dtype: Any) -> Array:
    """``array[rows]``."""
    return array[rows].astype(dtype)


def numba_loop(step: CompiledStep) -> Callable[..., tuple[Any, ...]]:
    """Compile the loop around a step.

    The step becomes a part of the loop: compiled as a function of its own it would be optimised
    once alone and once more within the loop, which takes a sixth of the time. PyTensor stores the
    machine code of operations on disk. The loop is stored beside it, under a key made from the
    step's.
    """
    graph = step.function.maker.fgraph
    function, step_key = numba_funcify_and_cache_key(graph)
    fetched = [
        f"gather_{rows.ndim if rows.ndim in (1, 2) else 'any'}(fixed[{rows.array}], "
        f"rows[{rows.group}][t], {rows.dtype}_)"
        for rows in step.fetched
    ]
    inputs = [
        *(f"state[{i}]" for i in range(step.n_state)),
        "normals[t]",
        *fetched,
        *(f"rows[{group}][t]" for group in range(step.n_groups)),
    ]
    n_fixed = len(graph.inputs) - len(inputs)
    inputs += [f"fixed[{i}]" for i in range(n_fixed)]
    source = SOURCE.format(n=step.n_state, inputs=_as_tuple(inputs))
    names = {
        "__name__": __name__,
        "step": numba_njit(_with_one_argument(function.py_func), inline="always"),
        "isfinite": math.isfinite,
        "gather_1": gather_1,
        "gather_2": gather_2,
        "gather_any": gather_any,
        **{f"{rows.dtype}_": np.dtype(rows.dtype).type for rows in step.fetched},
    }
    cache_key = None
    if step_key is not None:
        text = f"{THIS_FILE}{step.n_state} {step.n_groups} {step.fetched} {step_key}"
        cache_key = sha256(text.encode()).hexdigest()
    loop = compile_numba_function_src(source, "inner_loop", names, cache_key=cache_key)
    return _ending_at_errors(numba_njit(loop, final_function=True, cache=step_key is not None))


def _as_tuple(items: list[str]) -> str:
    """Source text of a tuple of ``items``: the sum of tuples of a few."""
    starts = range(0, len(items), MOST_IN_A_TUPLE)
    return " + ".join(f"({', '.join(items[i : i + MOST_IN_A_TUPLE])},)" for i in starts)


def _with_one_argument(function: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that PyTensor wrote, with a tuple of its arguments for the only one.

    A call with more than thirty arguments is one that Numba can't inline.
    """
    module = ast.parse(function.__source__)  # type: ignore[attr-defined]
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef)
    names = ", ".join(argument.arg for argument in definition.args.args)
    definition.args.args = [ast.arg("arguments")]
    definition.body = [*ast.parse(f"{names}, = arguments").body, *definition.body]
    source = ast.unparse(ast.fix_missing_locations(module))
    return compile_numba_function_src(source, definition.name, dict(function.__globals__))


def _ending_at_errors(compiled: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Let a loop end before a step that divides by zero, as before one that isn't finite.

    Some functions of Numba raise an error there, such as 0.0**n with a negative whole number n,
    where those of NumPy are infinite.
    """

    def loop(
        state: tuple[Array, ...], normals: Array, rows: tuple[Array, ...], fixed: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        try:
            return compiled(state, normals, rows, fixed)
        except ZeroDivisionError:
            return one_by_one(state, normals, rows, fixed)

    def one_by_one(
        state: tuple[Array, ...], normals: Array, rows: tuple[Array, ...], fixed: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        sums = np.zeros(3)
        logp = 0.0
        for t in range(len(normals)):
            here = slice(t, t + 1)
            try:
                new, made, *of_step, its_logp = compiled(
                    state, normals[here], tuple([of_group[here] for of_group in rows]), fixed
                )
            except ZeroDivisionError:
                made = 0
            if not made:
                return state, t, *sums, logp
            state = new
            sums += of_step
            logp = its_logp
        return state, len(normals), *sums, logp

    return loop
