"""Checks of arguments that samplers share."""

import numpy as np

from pymc.util import get_value_vars_from_user_vars

__all__ = ["continuous_variables", "is_number", "whole_steps"]


def continuous_variables(vars, model, sampler) -> list:
    """Value variables to sample, in the model's order, which is that of PyMC's points."""
    chosen = (
        model.continuous_value_vars if vars is None else get_value_vars_from_user_vars(vars, model)
    )
    discrete = [var.name for var in chosen if not var.dtype.startswith("float")]
    if discrete:
        raise ValueError(
            f"{sampler}(vars=...): {', '.join(discrete)} is discrete and has no gradient. Leave it "
            "out of vars: PyMC gives it another step method."
        )
    if not chosen:
        raise ValueError(f"{sampler}: the model has no continuous unknowns to sample.")
    return [var for var in model.value_vars if var in set(chosen)]


def is_number(value) -> bool:
    """Whether ``value`` is one real number, of Python's or NumPy's, and no bool."""
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiu"


def whole_steps(name, value, unit="inner steps") -> int:
    """Check a number of steps, or of another ``unit``."""
    if not (is_number(value) and np.asarray(value).dtype.kind in "iu" and value >= 1):
        raise ValueError(f"{name}={value!r}: must be a whole number of {unit}, at least 1.")
    return int(value)
