"""The bias report in tables and in words. Knows numbers, no models and no steps."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from scipy.stats import norm

from pymc_sghmc.diagnostics.mixing import by_variable, say_unmixed, unmixed
from pymc_sghmc.diagnostics.stein import DRAWS_PER_UNKNOWN

__all__ = ["BiasReport"]

SD_TOLERANCE = np.log1p(0.05)  # what counts as right: standard deviations within 5 %
MEAN_TOLERANCE = 0.1  # and means within 0.1 posterior standard deviations
VAGUE_MEAN = 0.5  # sds within which a mean must be known for a verdict
FALSE_ALARMS = 1e-4  # of each question asked of right draws; strict, for skewed posteriors
MANY = 20  # unknowns, above which so many of the worst are printed alone
MOST_PRINTED = 10


@dataclass(frozen=True, eq=False)
class BiasReport:
    """What `check_bias` found. ``print(report)`` says it in words.

    All of it is on the scale of PyMC's unconstrained unknowns, that is log σ for a HalfNormal σ.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per unknown, named as ArviZ names it, with ``mean_shift`` (mean of the draws minus
        that of the posterior, in posterior standard deviations), ``temperature`` (1 for right
        draws) and ``sd_ratio`` (standard deviation of the draws over that of the posterior), each
        with its Monte Carlo standard error in a column ``..._error``.
    variables : pandas.DataFrame
        One row per variable: mean temperature and geometric mean of ``sd_ratio`` over its entries.
        The last row, ``(all)``, is over all unknowns.
    mixing : pandas.DataFrame
        Rank-normalised ``r_hat`` and ``ess_bulk`` of each unknown, over all draws that count.
    temperatures : pandas.DataFrame
        The temperatures of the run, over the target's: ``full data`` from this report,
        ``configurational`` and ``kinetic`` from the minibatches of each stochastic-gradient step.
    draws : xarray.Dataset
        ``position`` and ``gradient`` of the log-density, over (chain, draw, unknown).
    left_out : int
        Draws left out because they or their gradients are not finite.
    jumping : list of str
        Variables at which the log-density jumps: there gradients can't tell whether draws are
        right.
    uses_correlations : bool
        Whether ``sd_ratio`` and ``mean_shift`` allow for correlations between unknowns.
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
        """Whether R-hat is at most 1.05, and there are 100 effective draws, of each unknown."""
        return unmixed(self.mixing).empty

    @property
    def biased(self) -> bool:
        """Whether a standard deviation is off by 5 % or a mean by 0.1 of one, and beyond chance.

        True as well where the chains haven't mixed: then the draws aren't to be relied on.
        """
        found = any(self._found(name).any() for name in ("sd", "mean", "average sd", "temperature"))
        return found or not self.mixed

    def worst(self, n=MOST_PRINTED) -> pd.DataFrame:
        """Return the ``n`` rows of ``table`` that are furthest off, in sd or in mean."""
        sizes = [self._deviations(name)[0].abs() for name in ("sd", "mean")]
        badness = np.fmax(sizes[0] / SD_TOLERANCE, sizes[1] / MEAN_TOLERANCE).fillna(np.inf)
        return self.table.loc[badness.nlargest(n).index]

    def _deviations(self, name) -> tuple[pd.Series, pd.Series]:
        """Estimates that are zero for right draws, with their errors."""
        table = self.table if name in ("sd", "mean") else self.variables.loc[["(all)"]]
        if name == "mean":
            return table["mean_shift"], table["mean_shift_error"]
        if name == "temperature":
            return table["temperature"] - 1, table["temperature_error"]
        return np.log(table["sd_ratio"]), table["sd_ratio_error"] / table["sd_ratio"]

    def _found(self, name) -> pd.Series:
        """Those that are off by more than the tolerance and by more than chance."""
        deviation, error = self._deviations(name)
        chance = norm.isf(FALSE_ALARMS / len(deviation)) * error
        tolerance = {"mean": MEAN_TOLERANCE, "temperature": np.expm1(2 * SD_TOLERANCE)}
        bound = np.maximum(tolerance.get(name, SD_TOLERANCE), chance)
        return deviation[deviation.abs() > bound]

    def __str__(self):
        d = len(self.table)
        n = self.draws.sizes["chain"] * self.draws.sizes["draw"] - self.left_out
        verdict = [*say_unmixed(self.mixing), *self._say_jumps()]
        if self.mixed and self.biased:
            found = [self._say_sds(), self._say_means()]
            if self._worst_is_a_mean():
                found.reverse()
            verdict += [*found[0], *found[1]]
        elif self.mixed and not self.jumping:
            verdict += self._say_right()
        lines = [*verdict, "", f"{n} gradients of all data, {d} unknown{'s' * (d > 1)}."]
        if self.left_out:
            lines.append(f"{self.left_out} draws left out: they or their gradients aren't finite.")
        lines += (
            self._tables() if self.mixed else ["", _text(unmixed(self.mixing).head(MOST_PRINTED))]
        )
        lines += ["", "Temperatures, 1 being the target:", _text(self.temperatures)]
        return "\n".join(lines)

    def _tables(self) -> list[str]:
        """Show what was estimated, unknown by unknown and by variable."""
        d = len(self.table)
        table = self.table
        lines = []
        if d > 1 and not self.uses_correlations:
            lines.append(
                "Correlations are left out of sd_ratio and mean_shift: they take "
                f"{DRAWS_PER_UNKNOWN} effective draws per unknown, n_draws={DRAWS_PER_UNKNOWN * d} "
                "or more."
            )
        if d > MANY:
            table = self.worst()
            lines += ["", f"The {len(table)} unknowns that are furthest off:"]
        lines += ["", _text(table)]
        if len(self.variables) > 2 and len(self.variables) <= d:
            lines += ["", "By variable:", _text(self.variables)]
        return lines

    __repr__ = __str__

    def _say_jumps(self) -> list[str]:
        """Say where gradients can't tell."""
        if not self.jumping:
            return []
        return [
            "This can't tell: the log-density jumps where a condition, an index or a rounded "
            f"number changes with {', '.join(self.jumping)}, and gradients don't see it.",
            "Make the condition smooth, or give these unknowns to pm.Slice or pm.Metropolis and "
            "all data, which need no gradient.",
        ]

    def _say_sds(self) -> list[str]:
        """Say which standard deviations are off, and the remedy."""
        single = self._found("sd")
        average = self._found("average sd")
        heat = self._found("temperature")
        [total] = self.variables.loc[["(all)"]].itertuples()
        ratio = self.table["sd_ratio"]
        error = self.table["sd_ratio_error"]
        worst = single.abs().idxmax() if len(single) else None
        if worst:
            text = f"The standard deviation of {worst} is {_percent(ratio[worst], error[worst])}"
            if len(ratio) > 1:
                text += f"; off are {by_variable(single.index, ratio.index)}"
            if len(average) and len(ratio) > 1:
                text += f"; on average {_percent(total.sd_ratio, total.sd_ratio_error)}"
        elif len(average):
            text = (
                f"Standard deviations are {_percent(total.sd_ratio, total.sd_ratio_error)} on "
                "average, though no single one is seen to be off"
            )
        elif len(heat):
            text = (
                f"The temperature is {total.temperature:.2f} ± {total.temperature_error:.2f} "
                "times what it should be: combinations of unknowns vary too "
                f"{'much' if total.temperature > 1 else 'little'}, though no single one is seen to"
            )
        else:
            return []
        largest = max((*single, *average, *heat), key=abs)
        if largest > 0:
            return [f"{text}.", "Lower learning_rate or target_bias, or raise batch_size."]
        return [
            f"{text}.",
            "The chains haven't reached the posterior yet or move too slowly: raise tune and "
            "draws, or leave more settings to the step.",
        ]

    def _say_means(self) -> list[str]:
        """Say which means are off, and the remedy."""
        shifted = self._found("mean")
        if shifted.empty:
            return []
        worst = shifted.abs().idxmax()
        text = (
            f"The mean of {worst} is {abs(shifted[worst]):.2f} ± "
            f"{self.table['mean_shift_error'][worst]:.2f} posterior standard deviations too "
            f"{'high' if shifted[worst] > 0 else 'low'}"
        )
        if len(self.table) > 1:
            text += f"; off are {by_variable(shifted.index, self.table.index)}"
        return [f"{text}.", "Raise tune if the chains disagree, else lower learning_rate."]

    def _worst_is_a_mean(self) -> bool:
        """Whether a mean is further off, for its tolerance, than any standard deviation."""
        sd = self._found("sd").abs().max()
        mean = self._found("mean").abs().max()
        return bool(mean / MEAN_TOLERANCE > np.nan_to_num(sd) / SD_TOLERANCE)

    def _say_right(self) -> list[str]:
        """Say how large a bias could have been missed, and why it isn't known better."""
        limits = {}
        worst = {}
        for name in ("sd", "mean", "average sd"):
            deviation, error = self._deviations(name)
            limit = (deviation.abs() + 2 * error).fillna(np.inf)
            limits[name] = limit.max()
            worst[name] = limit.idxmax()
        average, single = (f"{100 * np.expm1(limits[k]):.0f} %" for k in ("average sd", "sd"))
        why = []
        if not limits["mean"] <= VAGUE_MEAN:
            why.append(f"the mean of {worst['mean']}")
        if np.isinf(limits["sd"]):
            why.append(f"the standard deviation of {worst['sd']}")
        elif not limits["average sd"] <= 2 * SD_TOLERANCE:
            why.append(f"standard deviations, least that of {worst['sd']}")
        text = "This can't tell" if why else "No bias found"
        text += f": standard deviations are right within {average}"
        means = f"means within {limits['mean']:.2f} posterior standard deviations"
        if len(self.table) > 1:
            of_each = f"{single} for the worst, {worst['sd']}"
            known = np.isfinite(limits["sd"])
            text += f" on average and {of_each if known else 'not known for each'}"
            means += f" for the worst, {worst['mean']}"
        text += f"; {means}"
        lines = [f"{text} (estimate and two standard errors)."]
        if why:
            n = self.draws.sizes["chain"] * self.draws.sizes["draw"]
            ess = self.mixing["ess_bulk"]
            lines.append(
                f"Too little is known of {' and of '.join(why)}: gradients at {n} draws, and "
                f"{ess.min():.0f} effective draws of {ess.idxmin()}, are too few for a posterior "
                "of this shape. Raise n_draws, or sample longer."
            )
        return lines


def _text(table) -> str:
    return table.to_string(float_format="{:.3f}".format)


def _percent(ratio, error) -> str:
    if ratio > 10:
        return f"{ratio:.3g} ± {error:.2g} times what it should be"
    digits = 0 if error >= 0.005 else 1
    direction = "large" if ratio > 1 else "small"
    return f"{100 * abs(ratio - 1):.{digits}f} ± {100 * error:.{digits}f} % too {direction}"
