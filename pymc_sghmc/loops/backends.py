"""The loop around a compiled inner step: compiled as well where the backend is Numba or JAX.

What PyTensor keeps to itself of its linkers is used here and in `numba_loop`, nowhere else. Knows
backends, no samplers and no gradients.

A loop takes ``(state, normals, rows, fixed)``: a tuple of arrays of shape (d,), normals of shape
(k, d), a tuple of arrays of rows of shape (k, n), and a tuple of all else that the step takes. It
returns the state after the last step, or before the first whose sums aren't finite, the number of
steps made, the three sums over them and the last one's log-density, 0 where the step has none.
"""

import math

import numpy as np

from pytensor.compile.mode import get_mode

__all__ = ["is_jax", "is_numba", "loop_around", "resident", "shared_values"]


def is_numba(mode) -> bool:
    """Whether a PyTensor mode, or the default for None, compiles with Numba."""
    return type(get_mode(mode).linker).__name__ == "NumbaLinker"


def is_jax(mode) -> bool:
    """Whether a PyTensor mode, or the default for None, compiles with JAX."""
    return type(get_mode(mode).linker).__name__ == "JAXLinker"


def shared_values(function, n_inputs: int) -> tuple:
    """Values, now, of the shared variables behind the ``n_inputs`` inputs of a compiled function."""
    return tuple(container.storage[0] for container in function.input_storage[n_inputs:])


def resident(function, array):
    """Return what to pass for an array that stays the same over many calls of a compiled function.

    For JAX a copy on its device, which it would make anew at each call; else the array itself.
    """
    if type(function.maker.linker).__name__ != "JAXLinker":
        return array
    import jax

    return jax.device_put(array)


def loop_around(function, n_inputs: int, n_state: int, n_rows: int, gathers: list):
    """Return the loop around a compiled step.

    Parameters
    ----------
    function : compiled step
    n_inputs, n_state, n_rows : int
        Its inputs, and of these arrays of the state and groups of rows.
    gathers : list
        Batches that a loop of Numba's fetches: see `numba_loop`.
    """
    linker = type(function.maker.linker).__name__
    if linker == "NumbaLinker":
        from pymc_sghmc.loops.numba_loop import numba_loop

        compiled = numba_loop(function, n_state, n_rows, gathers)
    elif linker == "JAXLinker":
        compiled = _jax_loop(function)
    else:
        return _python_loop(function)

    def loop(state, normals, rows, fixed):
        return compiled(state, normals, rows, (*fixed, *shared_values(function, n_inputs)))

    return loop


def _python_loop(function):
    def loop(state, normals, rows, fixed):
        sums = np.zeros(3)
        logp = 0.0
        for t in range(len(normals)):
            *new, more = function(*state, normals[t], *(row[t] for row in rows), *fixed)
            if not math.isfinite(more[0] + more[3]):
                return state, t, *sums, logp
            state = new
            sums = sums + more[:3]
            logp = more[3]
        return state, len(normals), *sums, logp

    return loop


def _jax_loop(function):
    """Compile the loop with JAX's scan: a step that isn't finite leaves the state as it was."""
    import jax
    import jax.numpy as jnp

    step = function.vm.jit_fn

    @jax.jit
    def scan(state, normals, rows, fixed):
        def body(carry, inputs):
            state, made, going, sums, logp = carry
            normal, row = inputs
            *new, more = step(*state, normal, *row, *fixed)
            going = going & jnp.isfinite(more[0] + more[3])
            state = tuple(jnp.where(going, a, b) for a, b in zip(new, state, strict=True))
            logp = jnp.where(going, more[3], logp)
            sums = sums + jnp.where(going, more[:3], 0.0)
            return (state, made + going, going, sums, logp), None

        start = (state, jnp.array(0), jnp.array(True), jnp.zeros(3), jnp.zeros(()))
        (state, made, _, sums, logp), _ = jax.lax.scan(body, start, (normals, rows))
        return state, made, sums, logp

    def loop(state, normals, rows, fixed):
        state, made, sums, logp = scan(state, normals, rows, fixed)
        return tuple(map(np.array, state)), int(made), *np.asarray(sums).tolist(), float(logp)

    return loop
