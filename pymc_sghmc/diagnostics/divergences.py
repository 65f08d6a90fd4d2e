"""The warning of divergences after tuning. Knows no steps, no models."""

from typing import Any

from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sghmc.diagnostics.temperatures import by_step
from pymc_sghmc.pymc_hooks import divergences_are_ours

__all__ = ["divergence_warnings"]


def divergence_warnings(idata: Any) -> list[SamplerWarning]:
    """Warn of chains that diverged after tuning and went on from a new start.

    The last draw of a chain isn't counted: one that stopped there has said so. Beside NUTS, PyMC
    counts and warns.
    """
    if not divergences_are_ours(idata):
        return []
    of_steps = by_step(idata.sample_stats["diverging"])
    n = int(sum(diverging[:, :-1].sum() for diverging in of_steps))
    if n == 0:
        return []
    is_one = n == 1
    text = (
        f"There {'was' if is_one else 'were'} {n} divergence{'' if is_one else 's'} after tuning: "
        "a chain came to where its steps are too long to be stable, and went on from a new start. "
        "The draws have too little of such places, such as the neighbourhood of zero of a scale. "
        "Look at sample_stats.diverging. If they matter, use NUTS, or rewrite the model so that "
        "such scales keep away from zero."
    )
    return [SamplerWarning(WarningType.BAD_PARAMS, text, "warn")]
