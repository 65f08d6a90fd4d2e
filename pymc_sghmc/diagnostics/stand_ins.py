"""The warning where a result holds log-likelihoods of other rows than those of the run.

Knows what ``pm.sample`` returned; no steps, no models.
"""

from typing import Any

from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sghmc.diagnostics.full_data import rows_of_run

__all__ = ["log_likelihood_warnings"]


def log_likelihood_warnings(idata: Any) -> list[SamplerWarning]:
    """Warn of log-likelihoods of the few rows that the model holds, after a run with ``data=``.

    They come of ``idata_kwargs={"log_likelihood": True}``, and `az.loo` would take them for all.
    """
    log_likelihood = getattr(idata, "log_likelihood", None)
    n_rows = rows_of_run(idata)
    if log_likelihood is None or not n_rows:
        return []
    by_name = {
        str(name): variable.shape[2] if variable.ndim > 2 else 1
        for name, variable in log_likelihood.data_vars.items()
    }
    if not by_name or n_rows in by_name.values():
        return []
    name, held = max(by_name.items(), key=lambda entry: entry[1])
    text = (
        f"The log-likelihoods of {name} in the result are those of the {held:,} rows that the "
        f"model holds, and the run was made with {n_rows:,}. az.loo would judge it by these few: "
        "use pymc_sghmc.diagnostics.loo(idata, step), which reads all rows. For the bias of the "
        "run use check_bias(idata, step)."
    )
    return [SamplerWarning(WarningType.BAD_PARAMS, text, "warn")]
