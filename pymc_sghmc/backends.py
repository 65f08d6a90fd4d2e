"""The loop around a compiled inner step: compiled as well where the backend is Numba or JAX.

What PyTensor keeps private of its linkers is used here and nowhere else; where it isn't as expected,
the loop is Python's. Knows backends, no samplers and no gradients.

A loop takes ``(state, normals, rows, fixed)``: a tuple of arrays of shape (d,), normals of shape
(k, d), a tuple of arrays of rows of shape (k, n), and a tuple of all else that the step takes. It
returns the state after the last step, or before the first whose sums aren't finite, the number of
steps made, and the three sums over them.
"""

import logging
import math

import numpy as np

__all__ = ["loop_around", "resident"]

_log = logging.getLogger(__name__)

NUMBA_SOURCE = """
def inner_loop(state, normals, rows, fixed):
    virial = square_norm = kinetic = 0.0
    for t in range(normals.shape[0]):
        new = step(*state, normals[t], {rows}*fixed)
        if not isfinite(new[{n}].item()):
            return state, t, virial, square_norm, kinetic
        state = new[:{n}]
        virial += new[{n}].item()
        square_norm += new[{n} + 1].item()
        kinetic += new[{n} + 2].item()
    return state, normals.shape[0], virial, square_norm, kinetic
"""


def resident(function, array):
    """Return what to pass for an array that stays the same over many calls of a compiled function.

    For JAX a copy on its device, which it would make anew at each call; else the array itself.
    """
    if type(function.maker.linker).__name__ != "JAXLinker":
        return array
    import jax

    return jax.device_put(array)


def loop_around(function, n_state: int, n_rows: int):
    """Return the loop around a compiled step of ``n_state`` arrays and ``n_rows`` arrays of rows."""
    linker = type(function.maker.linker).__name__
    try:
        if linker == "NumbaLinker":
            return _numba_loop(function, n_state, n_rows)
        if linker == "JAXLinker":
            return _jax_loop(function)
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning("Inner steps run in a Python loop: %s", error)
    return _python_loop(function)


def _python_loop(function):
    def loop(state, normals, rows, fixed):
        sums = [0.0, 0.0, 0.0]
        for t in range(len(normals)):
            *new, virial, square_norm, kinetic = function(
                *state, normals[t], *(row[t] for row in rows), *fixed
            )
            if not math.isfinite(virial):
                return state, t, *sums
            state = new
            sums = [sums[0] + float(virial), sums[1] + float(square_norm), sums[2] + float(kinetic)]
        return state, len(normals), *sums

    return loop


def _numba_loop(function, n_state, n_rows):
    """Compile the loop with Numba; its cache is PyTensor's, under a key of the step's."""
    from pytensor.link.numba.cache import compile_numba_function_src
    from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache, numba_njit

    step, key = numba_funcify_ensure_cache(function.maker.fgraph)
    source = NUMBA_SOURCE.format(n=n_state, rows="".join(f"rows[{i}][t], " for i in range(n_rows)))
    loop = compile_numba_function_src(
        source,
        "inner_loop",
        {"__name__": __name__, "step": step, "isfinite": math.isfinite},
        cache_key=None if key is None else f"pymc_sghmc_inner_loop_2_{n_state}_{n_rows}_{key}",
    )
    return numba_njit(loop, final_function=True, cache=key is not None)


def _jax_loop(function):
    """Compile the loop with JAX's scan: a step that isn't finite leaves the state as it was."""
    import jax
    import jax.numpy as jnp

    step = function.vm.jit_fn

    @jax.jit
    def scan(state, normals, rows, fixed):
        def body(carry, inputs):
            state, made, going, sums = carry
            normal, row = inputs
            *new, virial, square_norm, kinetic = step(*state, normal, *row, *fixed)
            going = going & jnp.isfinite(virial)
            state = tuple(jnp.where(going, a, b) for a, b in zip(new, state, strict=True))
            more = jnp.stack([virial, square_norm, kinetic]).astype(float)
            return (state, made + going, going, sums + jnp.where(going, more, 0.0)), None

        start = (state, jnp.array(0), jnp.array(True), jnp.zeros(3))
        (state, made, _, sums), _ = jax.lax.scan(body, start, (normals, rows))
        return state, made, sums

    def loop(state, normals, rows, fixed):
        state, made, sums = scan(state, normals, rows, fixed)
        return tuple(map(np.array, state)), int(made), *np.asarray(sums).tolist()

    return loop
