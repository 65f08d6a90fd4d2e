"""Bambi's models and results: which draws are those of the PyMC model. Imports no Bambi.

By default (``center_predictors=True``) Bambi's PyMC model has centred predictors, and Bambi shifts
the draws of the intercept after sampling, to that of the predictors as they were given. The shifted
values are no draws of the PyMC model. Bambi also drops the offsets of non-centred group effects.
"""

from typing import Any

import numpy as np

from pymc.model import Model
from pytensor.graph.basic import Constant

from pymc_sghmc.compat import ancestors

__all__ = ["pymc_model_and_draws"]

ROUND_OFF = 1e-8  # times the standard deviation of a column, of the mean of centred ones


def pymc_model_and_draws(idata: Any, model: Any, caller: str) -> tuple[Any, Model]:
    """Return the PyMC model of a run, and its draws as this model has them.

    Parameters
    ----------
    idata : InferenceData or DataTree
    model : pm.Model or bambi.Model
        With a model of Bambi what Bambi did to the draws after sampling is undone.
    caller : str
        Name of the function, for messages.

    Raises
    ------
    ValueError
        If the draws are Bambi's, and can't be told to be those of the model.
    """
    if isinstance(model, Model):
        if _is_by_bambi(idata) and _has_centred_predictors(model):
            raise ValueError(
                f"{caller}: these draws come from Bambi, which by default "
                "(center_predictors=True) shifts the intercept after sampling: they may not be "
                "draws of this PyMC model. Pass Bambi's own model, model=model instead of "
                "model=model.backend.model, which undoes the shift. Or build the model with "
                "center_predictors=False and sample again."
            )
        return idata, model
    pymc_model = getattr(getattr(model, "backend", None), "model", None)
    if not isinstance(pymc_model, Model):
        raise TypeError(
            f"{caller}(model={type(model).__name__}): model must be the PyMC model that was "
            "sampled, or a built model of Bambi."
        )
    if not _is_by_bambi(idata):
        return idata, pymc_model  # pm.sample made them: nothing was shifted
    undo = getattr(model, "_re_center_intercept", None)
    if undo is not None:
        return undo(idata), pymc_model
    if model.center_predictors:
        raise ValueError(
            f"{caller}: this version of Bambi can't undo the shift of the intercept. Build the "
            "model with center_predictors=False and sample again, or upgrade Bambi."
        )
    return idata, pymc_model


def _is_by_bambi(idata: Any) -> bool:
    posterior = getattr(idata, "posterior", None)
    return getattr(posterior, "attrs", {}).get("modeling_interface") == "bambi"


def _has_centred_predictors(model: Model) -> bool:
    """Whether a likelihood has a constant matrix whose columns all have the mean zero."""
    return any(
        _is_centred(variable.data)
        for variable in ancestors(model.observed_RVs)
        if isinstance(variable, Constant) and getattr(variable.type, "ndim", 0) == 2
    )


def _is_centred(matrix: np.ndarray) -> bool:
    if not hasattr(matrix, "std") or not matrix.size or matrix.dtype.kind != "f":
        return False
    spread = matrix.std(axis=0)
    return bool((spread > 0).all() and (np.abs(matrix.mean(axis=0)) <= ROUND_OFF * spread).all())
