"""Log-densities of models and their gradients from minibatches, as steps make them."""

import numpy as np

from modes import FAST

from pymc_sghmc.compat import SolveTriangular, ancestors
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.minibatch_gradient import minibatch_gradient
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.rows.data import Minibatch
from pymc_sghmc.step.gradients import model_by_row


def plain_gradient(
    model,
    unknowns,
    batch_size=None,
    initial_point=None,
    compile_kwargs=None,
    *,
    data=None,
    replace=True,
    rewriting=None,
    pool=None,
):
    """Make the gradient from minibatches that steps make of a model, without a step."""
    point = model.initial_point() if initial_point is None else initial_point
    rewriting = Rewriting() if rewriting is None else rewriting
    rows, source = model_by_row(model, unknowns, batch_size, point, data, rewriting)
    return minibatch_gradient(rows, LogDensity(rows, compile_kwargs), source, replace, pool)


def gradient_of(model, batch_size=None, variables=None, **options):
    """Gradient with respect to some unknowns, by default all continuous ones, quick to compile."""
    variables = model.continuous_value_vars if variables is None else variables
    unknowns = Unknowns(variables, model.initial_point())
    return plain_gradient(model, unknowns, batch_size, **{"compile_kwargs": FAST, **options})


def minibatch_of(gradient, *rows):
    """Minibatch of these rows at hand, an array of their numbers for each group."""
    return Minibatch(rows, gradient.data.resident)


def on_rows(gradient, position, *rows):
    """Log-density and gradient at ``position`` on a minibatch of these rows at hand."""
    return gradient(position, minibatch_of(gradient, *rows))


def start_of(step):
    """Point at which chains of a step begin as a rule."""
    return step.unknowns.unravel(step.tuner.initial, {})


def log_density(density, position, n_rows):
    """Log-density from all rows of a density with one group of them."""
    arrays = [getattr(source, "data", source) for source in density.sources]
    one = np.ones(())
    return float(density(position, one, [np.ones(n_rows)], [np.arange(n_rows)], arrays)[0])


def by_way_of_the_model(density, logp, unknowns, point, position):
    """The same by PyMC's log-density and the numerical Jacobian of a change of coordinates.

    Returns it, and sign and logarithm of the Jacobian.
    """
    steps = 1e-6 * np.eye(unknowns.d)
    ends = [(density.to_model(position + u), density.to_model(position - u)) for u in steps]
    jacobian = np.array([(there - back) / 2e-6 for there, back in ends])
    sign, log_jacobian = np.linalg.slogdet(jacobian)
    own = unknowns.unravel(density.to_model(position), point)
    return float(logp(own)) + log_jacobian, sign, log_jacobian


def solves(graphs):
    """Whether PyTensor solves triangular systems of equations in graphs."""
    ops = [v.owner.op for v in ancestors(graphs) if v.owner is not None]
    return any(isinstance(getattr(op, "core_op", op), SolveTriangular) for op in ops)
