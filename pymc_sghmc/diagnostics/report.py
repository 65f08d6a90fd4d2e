"""The bias report: tables, and a verdict in words. Knows numbers, no models and no steps."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from scipy.stats import norm

from pymc_sghmc.diagnostics.mixing import by_variable, not_mixed, report_not_mixed
from pymc_sghmc.diagnostics.stein import DRAWS_PER_PARAMETER

__all__ = ["BiasReport"]

SD_TOLERANCE = float(np.log1p(0.05))  # what counts as right: standard deviations within 5 %
MEAN_TOLERANCE = 0.1  # and means within 0.1 posterior standard deviations
VAGUE_MEAN = 0.5  # standard deviations within which a mean must be known for a verdict
FALSE_ALARMS = 1e-4  # probability for each test of correct draws; strict, for skewed posteriors
MANY = 20  # parameters; of more only the worst are printed
MOST_PRINTED = 10
FAR_OFF = 10.0  # posterior standard deviations, by which biased draws are hardly ever off


@dataclass(frozen=True, eq=False)
class BiasReport:
    """The result of `check_bias`. ``print(report)`` shows a verdict, the remedy and tables.

    All estimates are on PyMC's unconstrained scale: of log σ for ``pm.HalfNormal("sigma")``.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per parameter, named as ArviZ names it, with ``mean_shift`` (mean of the draws minus
        that of the posterior, in posterior standard deviations), ``temperature`` (1 for correct
        draws) and ``sd_ratio`` (standard deviation of the draws over that of the posterior), each
        with its Monte Carlo standard error in a column ``..._error``. NaN for ``jumping`` ones.
    variables : pandas.DataFrame
        One row per variable: mean temperature and geometric mean of ``sd_ratio`` over its entries.
        The last row, ``(all)``, is over all parameters that are not ``jumping``.
    mixing : pandas.DataFrame
        Rank-normalised ``r_hat`` and ``ess_bulk`` of each parameter, over all draws that count.
    temperatures : pandas.DataFrame
        The temperatures of the run divided by their target: ``full data`` from this report,
        ``configurational`` and ``kinetic`` from the minibatches of each stochastic-gradient step.
    draws : xarray.Dataset
        ``position`` and ``gradient`` of the log-density, over (chain, draw, parameter).
    left_out : int
        Draws left out because they or their gradients are not finite.
    jumping : list of str
        Variables at which the log-density jumps. Gradients don't show whether their draws are
        correct, so there are no estimates for them.
    uses_correlations : bool
        Whether ``sd_ratio`` and ``mean_shift`` allow for correlations between parameters.
    """

    table: pd.DataFrame
    variables: pd.DataFrame
    mixing: pd.DataFrame
    temperatures: pd.DataFrame
    draws: xr.Dataset
    left_out: int
    jumping: list[str]
    uses_correlations: bool

    @property
    def mixed(self) -> bool:
        """Whether each parameter has an R-hat of at most 1.05 and 100 effective draws."""
        return not_mixed(self.mixing).empty

    @property
    def biased(self) -> bool:
        """Whether a standard deviation is off by 5 % or a mean by 0.1 of one, and beyond chance.

        True as well if the chains haven't mixed: such draws can't be relied on.
        """
        return not self.mixed or any(
            self._significant(name).any() for name in ("sd", "mean", "average sd", "temperature")
        )

    def worst(self, n: int = MOST_PRINTED) -> pd.DataFrame:
        """Return the ``n`` rows of ``table`` with the largest deviations in sd or in mean."""
        sd, mean = (self._deviations(name)[0].abs() for name in ("sd", "mean"))
        deviations = np.fmax(sd / SD_TOLERANCE, mean / MEAN_TOLERANCE).fillna(np.inf)
        deviations = deviations.reindex(self.table.index, fill_value=-1.0)  # jumping ones last
        return self.table.loc[deviations.nlargest(n).index]

    @property
    def _judged(self) -> pd.DataFrame:
        """The rows of ``table`` that have estimates: of parameters where nothing jumps."""
        jumps = [name.partition("[")[0] in self.jumping for name in self.table.index]
        return self.table[~np.array(jumps, bool)]

    def _deviations(self, name: str) -> tuple[pd.Series, pd.Series]:
        """Return estimates that are zero for correct draws, with their errors."""
        table = self._judged if name in ("sd", "mean") else self.variables.loc[["(all)"]]
        if name == "mean":
            return table["mean_shift"], table["mean_shift_error"]
        if name == "temperature":
            return table["temperature"] - 1, table["temperature_error"]
        return np.log(table["sd_ratio"]), table["sd_ratio_error"] / table["sd_ratio"]

    def _significant(self, name: str) -> pd.Series:
        """Return the deviations above the tolerance that chance does not explain."""
        deviation, error = self._deviations(name)
        chance = float(norm.isf(FALSE_ALARMS / max(1, len(deviation)))) * error
        tolerance = {"mean": MEAN_TOLERANCE, "temperature": float(np.expm1(2 * SD_TOLERANCE))}
        bound = np.maximum(tolerance.get(name, SD_TOLERANCE), chance)
        return deviation[deviation.abs() > bound]

    def __str__(self) -> str:
        d = len(self.table)
        n = self.draws.sizes["chain"] * self.draws.sizes["draw"] - self.left_out
        lines = self._verdict()
        lines += ["", f"{n} gradients of all data, {d} parameter{'s' * (d > 1)}."]
        if self.left_out:
            lines.append(f"{self.left_out} draws left out: they or their gradients aren't finite.")
        if self.mixed:
            lines += self._tables()
        else:
            lines += ["", _text(not_mixed(self.mixing).head(MOST_PRINTED))]
        lines += ["", "Temperatures (target: 1):", _text(self.temperatures)]
        return "\n".join(lines)

    def _verdict(self) -> list[str]:
        lines = [*report_not_mixed(self.mixing), *self._report_jumps()]
        if not self.mixed or self._judged.empty:
            return lines
        if not self.biased:
            return [*lines, *self._report_accuracy()]
        of_sds = self._report_sds()
        of_means = self._report_means()
        if self._worst_is_a_mean():
            return [*lines, *of_means, *of_sds]
        return [*lines, *of_sds, *of_means]

    def _tables(self) -> list[str]:
        """Show the estimates by parameter and by variable."""
        d = len(self.table)
        table = self.table
        lines = []
        if len(self._judged) > 1 and not self.uses_correlations:
            lines.append(
                f"sd_ratio and mean_shift ignore correlations, which need {DRAWS_PER_PARAMETER} "
                "effective draws per parameter. To include them pass "
                f"n_draws={DRAWS_PER_PARAMETER * d} or more."
            )
        if d > MANY:
            table = self.worst()
            lines += ["", f"The {len(table)} parameters with the largest deviations:"]
        lines += ["", _text(table)]
        if len(self.variables) > 2 and len(self.variables) <= d:
            lines += ["", "By variable:", _text(self.variables)]
        return lines

    __repr__ = __str__

    def _report_jumps(self) -> list[str]:
        if not self.jumping:
            return []
        names = ", ".join(self.jumping)
        return [
            f"No verdict on {names}: the log-density jumps where a condition, an index or a "
            "rounded number changes with it, and gradients don't show whether draws are correct.",
            f"Make the condition smooth, or sample {names} with pm.Slice or pm.Metropolis and "
            "all data, which need no gradient.",
        ]

    def _report_sds(self) -> list[str]:
        """Name the standard deviations that are wrong, and the remedy."""
        single = self._significant("sd")
        average = self._significant("average sd")
        heat = self._significant("temperature")
        [total] = self.variables.loc[["(all)"]].itertuples()
        ratio = self._judged["sd_ratio"]
        error = self._judged["sd_ratio_error"]
        if len(single):
            worst = single.abs().idxmax()
            text = f"The standard deviation of {worst} is {_percent(ratio[worst], error[worst])}"
            if len(ratio) > 1:
                text += f"; affected: {by_variable(single.index, ratio.index)}"
            if len(average) and len(ratio) > 1:
                text += f"; on average {_percent(total.sd_ratio, total.sd_ratio_error)}"
        elif len(average):
            text = (
                f"Standard deviations are {_percent(total.sd_ratio, total.sd_ratio_error)} on "
                "average, although no single one is significantly wrong"
            )
        elif len(heat):
            text = (
                f"The temperature is {total.temperature:.2f} ± {total.temperature_error:.2f} "
                "times its target: combinations of parameters vary too "
                f"{'much' if total.temperature > 1 else 'little'}, although no single one does "
                "significantly"
            )
        else:
            return []
        largest = max((*single, *average, *heat), key=abs)
        if largest > 0:
            return [f"{text}.", "Lower learning_rate or target_bias, or raise batch_size."]
        return [
            f"{text}.",
            "Raise tune and draws, or leave more settings to the step: the chains haven't reached "
            "the posterior yet, or move too slowly.",
        ]

    def _report_means(self) -> list[str]:
        """Name the means that are wrong, and the remedy."""
        shifted = self._significant("mean")
        if shifted.empty:
            return []
        worst = shifted.abs().idxmax()
        text = (
            f"The mean of {worst} is {abs(shifted[worst]):.2f} ± "
            f"{self.table['mean_shift_error'][worst]:.2f} posterior standard deviations too "
            f"{'high' if shifted[worst] > 0 else 'low'}"
        )
        if len(self._judged) > 1:
            text += f"; affected: {by_variable(shifted.index, self._judged.index)}"
        if abs(shifted[worst]) > FAR_OFF:
            return [
                f"{text}.",
                "Pass the model or the step with the data of this run, if these are others. Else "
                "raise tune: the chains haven't reached the posterior.",
            ]
        return [f"{text}.", "Raise tune if the chains disagree, else lower learning_rate."]

    def _worst_is_a_mean(self) -> bool:
        """Whether a mean is further off, for its tolerance, than any standard deviation."""
        sd = self._significant("sd").abs().max()
        mean = self._significant("mean").abs().max()
        return bool(mean / MEAN_TOLERANCE > np.nan_to_num(sd) / SD_TOLERANCE)

    def _report_accuracy(self) -> list[str]:
        """State how large a bias could have been missed, and what would narrow it down."""
        limits = {}
        worst = {}
        for name in ("sd", "mean", "average sd"):
            deviation, error = self._deviations(name)
            limit = (deviation.abs() + 2 * error).fillna(np.inf)
            limits[name] = limit.max()
            worst[name] = limit.idxmax()
        uncertain = []
        if not limits["mean"] <= VAGUE_MEAN:
            uncertain.append(f"the mean of {worst['mean']}")
        if np.isinf(limits["sd"]):
            uncertain.append(f"the standard deviation of {worst['sd']}")
        elif not limits["average sd"] <= 2 * SD_TOLERANCE:
            uncertain.append(f"standard deviations, most of all that of {worst['sd']}")
        average, single = (f"{100 * np.expm1(limits[k]):.0f} %" for k in ("average sd", "sd"))
        sds = f"standard deviations are correct to within {average}"
        means = f"means to within {limits['mean']:.2f} posterior standard deviations"
        if len(self._judged) > 1:
            of_each = "not known for each"
            if np.isfinite(limits["sd"]):
                of_each = f"{single} at worst ({worst['sd']})"
            sds += f" on average, {of_each}"
            means += f" at worst ({worst['mean']})"
        verdict = "Inconclusive, too few draws" if uncertain else "No bias found"
        others = " in the other parameters" if self.jumping else ""
        lines = [f"{verdict}{others}: {sds}; {means} (estimate plus two standard errors)."]
        if uncertain:
            n = self.draws.sizes["chain"] * self.draws.sizes["draw"]
            ess = self.mixing["ess_bulk"]
            lines.append(
                f"Raise n_draws, or sample longer. Gradients at {n} draws, and {ess.min():.0f} "
                f"effective draws of {ess.idxmin()}, say too little about "
                f"{' and about '.join(uncertain)}."
            )
        return lines


def _text(table: pd.DataFrame) -> str:
    return table.to_string(float_format="{:.3f}".format)


def _percent(ratio: float, error: float) -> str:
    if ratio > 10:
        return f"{ratio:.3g} ± {error:.2g} times the correct one"
    digits = 0 if error >= 0.005 else 1
    direction = "large" if ratio > 1 else "small"
    return f"{100 * abs(ratio - 1):.{digits}f} ± {100 * error:.{digits}f} % too {direction}"
