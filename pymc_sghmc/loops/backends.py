"""The loop around a compiled inner step. With Numba and JAX the loop is compiled as well.

PyTensor's private knowledge of its linkers is used in this file and in `numba_loop`, nowhere else.
"""

import math

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pytensor import config
from pytensor.compile.mode import get_mode
from pytensor.link.vm import VMLinker

from pymc_sghmc.protocols import Array

__all__ = [
    "CompiledStep",
    "FetchedRows",
    "Loop",
    "LoopResult",
    "fastest_mode",
    "is_compiled_by_default",
    "is_jax",
    "is_numba",
    "loop_around",
    "resident",
    "shared_values",
]


class FetchedRows(NamedTuple):
    """Rows of an array that the loop copies for each step, faster than the step would."""

    array: int  # position of the array among the step's fixed inputs
    group: int  # position of the row numbers among the groups of rows
    ndim: int
    dtype: str


class CompiledStep(NamedTuple):
    """A compiled inner step, and the order of its inputs.

    Its inputs are arrays of the state, normals, fetched rows, row numbers and fixed inputs. Its
    outputs are the new arrays of the state and one vector: virial, squared norm of the gradient,
    squared norm of the momentum, log-density.
    """

    function: Any
    n_inputs: int  # shared variables of the model come after them
    n_state: int
    n_groups: int  # of rows
    fetched: tuple[FetchedRows, ...]  # by Numba's loop


class LoopResult(NamedTuple):
    """Inner steps made by a loop."""

    state: Sequence[Array]  # after the last step
    n_steps: int  # fewer than asked for if the next step is not finite
    virial: float  # sums over the steps
    square_norm: float
    kinetic: float
    logp: float  # of the last step; 0 if the step does not compute it


class Loop(Protocol):
    """Makes inner steps, one for each row of normals, until one is not finite."""

    def __call__(
        self,
        state: tuple[Array, ...],
        normals: Array,
        rows: tuple[Array, ...],
        fixed: tuple[Any, ...],
    ) -> LoopResult:
        """Make the steps.

        Parameters
        ----------
        state : tuple of array of shape (d,) or ()
        normals : array of shape (k, n_normals)
        rows : tuple of array of shape (k, n)
            Row numbers, for each group of rows.
        fixed : tuple
            All other inputs of the step, equal for all steps.
        """


def is_numba(mode: Any) -> bool:
    """Whether a PyTensor mode, or the default for None, compiles with Numba."""
    return type(get_mode(mode).linker).__name__ == "NumbaLinker"


def is_compiled_by_default() -> bool:
    """Whether PyTensor compiles to machine code where nobody has chosen a mode."""
    default = get_mode(None)
    in_c = isinstance(default.linker, VMLinker) and default.linker.c_thunks is not False
    return is_numba(None) or (in_c and bool(config.cxx))


def fastest_mode(mode: Any) -> Any:
    """Return the mode to compile inner steps in: Numba's, unless somebody has chosen another.

    With PyTensor 2 (PyMC 5.28) the default compiles each operation with C, which takes as long, and
    leaves the loop around the steps to Python. With PyMC 5's end, delete this.
    """
    if mode is None and is_compiled_by_default():
        return "NUMBA"
    return mode


def is_jax(mode: Any) -> bool:
    """Whether a PyTensor mode, or the default for None, compiles with JAX."""
    return type(get_mode(mode).linker).__name__ == "JAXLinker"


def shared_values(function: Any, n_inputs: int) -> tuple[Any, ...]:
    """Present values of the shared variables behind the ``n_inputs`` inputs of a function."""
    return tuple(container.storage[0] for container in function.input_storage[n_inputs:])


def resident(function: Any, array: Array) -> Any:
    """Return what to pass for an array that stays the same over many calls of a compiled function.

    JAX would copy the array to its device at each call, so for JAX this is a copy on the device.
    For other backends it is the array itself.
    """
    if type(function.maker.linker).__name__ != "JAXLinker":
        return array
    import jax

    return jax.device_put(array)


def loop_around(step: CompiledStep) -> Loop:
    """Return the loop around a compiled step."""
    linker = type(step.function.maker.linker).__name__
    if linker == "NumbaLinker":
        from pymc_sghmc.loops.numba_loop import numba_loop

        return _with_shared_values(numba_loop(step), step)
    if linker == "JAXLinker":
        return _with_shared_values(_jax_loop(step), step)
    return _python_loop(step)


def _with_shared_values(compiled: Any, step: CompiledStep) -> Loop:
    """Pass the values that the model's shared variables have at each call."""
    function = step.function
    n_inputs = step.n_inputs

    def loop(
        state: tuple[Array, ...],
        normals: Array,
        rows: tuple[Array, ...],
        fixed: tuple[Any, ...],
    ) -> LoopResult:
        everything = (*fixed, *shared_values(function, n_inputs))
        return LoopResult(*compiled(state, normals, rows, everything))

    return loop


def _python_loop(step: CompiledStep) -> Loop:
    function = step.function

    def loop(
        state: Sequence[Array],
        normals: Array,
        rows: tuple[Array, ...],
        fixed: tuple[Any, ...],
    ) -> LoopResult:
        sums = np.zeros(3)
        logp = 0.0
        made = 0
        for t in range(len(normals)):
            *new, outcome = function(*state, normals[t], *(row[t] for row in rows), *fixed)
            if not math.isfinite(outcome[0] + outcome[3]):
                break
            state = new
            sums = sums + outcome[:3]
            logp = outcome[3]
            made += 1
        virial, square_norm, kinetic = sums
        return LoopResult(state, made, virial, square_norm, kinetic, logp)

    return loop


def _jax_loop(step: CompiledStep) -> Any:
    """Compile the loop with JAX's scan: a step that is not finite leaves the state as it was."""
    import jax
    import jax.numpy as jnp

    step_function = step.function.vm.jit_fn

    @jax.jit
    def scan(state, normals, rows, fixed):  # type: ignore[no-untyped-def]
        def body(carry, inputs):  # type: ignore[no-untyped-def]
            state, made, is_going, sums, logp = carry
            normals_of_step, rows_of_step = inputs
            *new, outcome = step_function(*state, normals_of_step, *rows_of_step, *fixed)
            is_going = is_going & jnp.isfinite(outcome[0] + outcome[3])
            state = tuple(jnp.where(is_going, a, b) for a, b in zip(new, state, strict=True))
            logp = jnp.where(is_going, outcome[3], logp)
            sums = sums + jnp.where(is_going, outcome[:3], 0.0)
            return (state, made + is_going, is_going, sums, logp), None

        start = (state, jnp.array(0), jnp.array(True), jnp.zeros(3), jnp.zeros(()))
        (state, made, _, sums, logp), _ = jax.lax.scan(body, start, (normals, rows))
        return state, made, sums, logp

    def loop(state, normals, rows, fixed):  # type: ignore[no-untyped-def]
        state, made, sums, logp = scan(state, normals, rows, fixed)
        virial, square_norm, kinetic = np.asarray(sums).tolist()
        state = tuple(np.array(part) for part in state)
        return state, int(made), virial, square_norm, kinetic, float(logp)

    return loop
