"""From a sampler's arguments to its gradients. Knows arguments and gradients, no chain."""

import numpy as np

from pymc_sghmc.checks import quoted
from pymc_sghmc.gradients.centring import not_an_effect
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.minibatch_gradient import minibatch_gradient
from pymc_sghmc.gradients.second_order import second_order
from pymc_sghmc.models.contract import ALL_ROWS
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.step.effects import tell_of_groups

__all__ = ["gradients"]


def gradients(model, unknowns, point, given, preconditioner, effects=()) -> tuple:
    """Return the plain gradient, and control variates of first and second order, or None for them.

    Parameters
    ----------
    model : pm.Model
    unknowns : Unknowns
    point : dict
        A point of the model.
    given : dict
        Values of all shared arguments.
    preconditioner : "diag", "dense", "auto", array or None
        In use: with one that is given, settings have the unit of the model's own form.
    effects : list of Effect
        To be integrated out.
    """
    centring = given["centring"]
    may_centre = centring is not None and (isinstance(preconditioner, str) or centring != "auto")
    rows = given["batch_size"]
    if rows is None and effects and not minibatch_outputs([model.logp()]):
        rows = ALL_ROWS  # groups are cut out of all data, too
    plain = minibatch_gradient(
        model,
        unknowns,
        rows,
        point,
        given["compile_kwargs"],
        given["data"],
        given["replace"],
        may_centre,
        effects,
    )
    if plain.density.unknowns.parts and isinstance(preconditioner, np.ndarray):
        raise ValueError(
            f"preconditioner with marginalize={given['marginalize']!r}: there is a group of so "
            "many rows that its effect stays an unknown, of which the array knows nothing. Leave "
            "it at "
            '"auto".'
        )
    if effects and plain.density.given_types and not given["recover"]:
        others = quoted(name for name, _ in plain.density.given_types)
        raise ValueError(
            f"recover=False with marginalize={given['marginalize']!r}: other steps sample "
            f"{others}, given the effects. Leave it at True, or let this step sample all of them."
        )
    _set_centring(plain.density, centring)
    tell_of_groups(model, given, point, unknowns, plain)
    kind = given["gradient"]
    given_rows = given["batch_size"] != "auto"
    if kind in ("control_variates", "second_order") and plain.is_exact and given_rows:
        raise ValueError(
            f'gradient="{kind}": the gradient uses all data and has no noise. Pass a '
            'batch_size, or gradient="auto".'
        )
    moves = kind == "auto" and plain.density.likelihood_needs_others
    if kind == "plain" or plain.is_exact or moves:
        return plain, (None, None)
    # with a number of rows that somebody chose, "auto" is what it has always been; but with effects
    # what remains of the noise of first order makes steps short
    may_be = not given_rows or plain.density.centring is not None or effects
    wanted = kind == "second_order" or (kind == "auto" and may_be)
    second = second_order(plain) if wanted else None
    if isinstance(second, str):
        if kind == "second_order":
            raise ValueError(
                f'gradient="second_order": {second}. Use gradient="control_variates", or "auto".'
            )
        second = None
    return plain, (ControlVariates(plain), second)


def _set_centring(density, given):
    """Put λ into use that are given by name."""
    if isinstance(given, dict):
        if density.centring is None and given:
            raise ValueError(not_an_effect(given, next(iter(given)), ()))
        if density.centring is not None:
            density.set_centring(density.centring.named(given))
            density.centring.is_free = False
