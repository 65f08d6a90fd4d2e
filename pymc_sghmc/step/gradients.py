"""From a sampler's arguments to its gradients. Knows arguments and gradients, no chain."""

from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.minibatch_gradient import minibatch_gradient

__all__ = ["gradients"]


def gradients(model, unknowns, point, given) -> tuple:
    """Return the plain gradient, and control variates where they are wanted or allowed, else None.

    Parameters
    ----------
    model : pm.Model
    unknowns : Unknowns
    point : dict
        A point of the model.
    given : dict
        Values of all shared arguments.
    """
    plain = minibatch_gradient(
        model,
        unknowns,
        given["batch_size"],
        point,
        given["compile_kwargs"],
        given["data"],
        given["replace"],
    )
    kind = given["gradient"]
    if kind == "control_variates" and plain.is_exact:
        raise ValueError(
            'gradient="control_variates": the gradient uses all data and has no noise. Pass a '
            'batch_size, or gradient="auto".'
        )
    moves = kind == "auto" and plain.density.likelihood_needs_others
    if kind == "plain" or plain.is_exact or moves:
        return plain, None
    return plain, ControlVariates(plain)
