"""Effects that a step integrates out: which they are, and their values in recorded draws.

Knows arguments, models and densities, no chain.
"""

from collections.abc import Mapping

from pymc_sghmc.checks import quoted
from pymc_sghmc.loops.backends import is_jax
from pymc_sghmc.models.units import named_effects

__all__ = ["integrated_out", "recovered"]


def integrated_out(model, given, point, variables) -> tuple:
    """Return the effects that ``marginalize`` names, and the variables of a step that are left to sample.

    Parameters
    ----------
    model : pm.Model
    given : dict
        Values of all shared arguments.
    point : dict
        A point of the model.
    variables : list of TensorVariable
        Of the step.

    Raises
    ------
    ValueError
        If one isn't an effect, or other arguments leave no way to integrate it out.
    """
    names = given["marginalize"]
    if not names:
        return [], variables
    problems = {
        "data": given["data"] is not None
        and not isinstance(given["data"], Mapping)
        and "a loader gives rows in windows, and groups need all of theirs at once. Pass arrays, such as np.memmap",
        "compile_kwargs": is_jax((given["compile_kwargs"] or {}).get("mode"))
        and "JAX compiles for a fixed number of rows, and groups differ. Use Numba or C",
        "blocked": not given["blocked"]
        and "one step has to know all of the model. Leave it at True",
        "temperature": given["temperature"] != 1.0
        and "integrated out, effects have the temperature 1. Leave it at 1",
    }
    for name, problem in problems.items():
        if problem:
            raise ValueError(f"marginalize={list(names)!r} with {name}: {problem}.")
    effects = named_effects(model, names, point)
    gone = {effect.value: effect.rv.name for effect in effects}
    left = [v for v in variables if v not in gone]
    if missing := [name for value, name in gone.items() if value not in variables]:
        raise ValueError(
            f"marginalize={list(names)!r} with vars: vars lacks {quoted(missing)}. Add it."
        )
    if not left:
        raise ValueError(f"marginalize={list(names)!r}: no unknown is left to sample. Name fewer.")
    return effects, left


def recovered(gradient, position, rng, settings) -> dict:
    """Return values of effects that are integrated out, given all else; NaN where they aren't to be drawn."""
    density, marginal = gradient.density, gradient.density.marginal
    if marginal is None:
        return {}
    if settings["recover"]:
        return density.group_effects.draw(density, gradient.data, position, rng)[0]
    return marginal.nothing
