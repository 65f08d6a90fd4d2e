"""Numbers of rows in a minibatch among which the step chooses. Knows data, no set-ups."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from pymc_sghmc.tuning.budget import WITHOUT_NOISE, work_of_step

__all__ = [
    "RowChoice",
    "RowCounts",
    "all_rows_are_in_question",
    "all_rows_cost_little",
    "all_rows_may_be_used",
    "sizes_in_question",
]

FEW = (10, 20, 50, 100, 200)  # rows, beside those that the noise is measured with
MANY = (1000, 2000, 5000)
SIZES = (100, 200, *MANY), (100, 200, *MANY), (*FEW, *MANY)  # by the order of the gradient
# Clusters with all of their rows. Where there are fewer than MANY_CLUSTERS each weighs much, far
# out most of all.
FEWEST = 2
FEWEST_OF_FEW = 10
MANY_CLUSTERS = 1000
MOST_EXACT_ROWS = 1_000_000  # that each step may evaluate where minibatches don't serve


class RowChoice(Enum):
    """What a step may choose of the number of rows in a minibatch."""

    AS_GIVEN = auto()  # nothing
    AT_LEAST = auto()  # more than given, where second-order control variates need them
    FREE = auto()


class RowCounts(Protocol):
    """How many rows data have, and how many of them a minibatch: see `InMemory`."""

    @property
    def n_rows(self) -> Sequence[int]:
        """Of each group of observations."""

    @property
    def n_at_hand(self) -> Sequence[int]:
        """The same, of the rows that are in memory."""

    @property
    def is_noisy(self) -> Sequence[bool]:
        """Whether a minibatch of each group is less than all of its rows."""

    @property
    def noisy_batch_sizes(self) -> Sequence[int]:
        """Sizes of the minibatches of those groups."""

    @property
    def rows_of_each(self) -> float:
        """Rows, on average, of what is drawn: more than one where that is clusters."""


def sizes_in_question(data: RowCounts, order: int, choice: RowChoice = RowChoice.FREE) -> list[int]:
    """Return the numbers of rows, or of clusters, that minibatches may have.

    Parameters
    ----------
    data : RowCounts
        Whose minibatches have the number that the noise is measured with, the first of them.
    order : int
        Of the gradient.
    choice : RowChoice
        Among all of them, or among that number and more.
    """
    [n, *_] = data.noisy_batch_sizes
    noisy = [rows for rows, is_noisy in zip(data.n_rows, data.is_noisy, strict=True) if is_noisy]
    fewest = FEWEST if max(noisy) >= MANY_CLUSTERS else FEWEST_OF_FEW
    of_rows = [round(rows / data.rows_of_each) for rows in SIZES[order]]
    in_question = dict.fromkeys(max(fewest, size) for size in of_rows)
    sizes = [n, *(size for size in in_question if size <= max(noisy) // 2)]
    if choice is RowChoice.AT_LEAST:
        sizes = [size for size in sizes if size >= n]
    if order == 0 and all_rows_are_in_question(data):
        sizes.append(max(noisy))
    return sizes


def all_rows_are_in_question(data: RowCounts) -> bool:
    """Whether a minibatch may be all rows, without noise, if all else fails.

    Not of clusters, nor of a source's.
    """
    return bool(data.rows_of_each == 1 and data.n_at_hand == data.n_rows)


def all_rows_may_be_used(data: RowCounts) -> bool:
    """Whether each step may evaluate all rows, as NUTS would, where minibatches don't serve."""
    return all_rows_are_in_question(data) and max(data.n_rows) <= MOST_EXACT_ROWS


def all_rows_cost_little(data: RowCounts, d: int) -> bool:
    """Whether a step of all rows costs so little more than one of few that it will take all."""
    if not all_rows_are_in_question(data):
        return False
    if not any(data.is_noisy):
        return True
    [n, *_] = data.noisy_batch_sizes
    return work_of_step(d, max(data.n_rows)) < WITHOUT_NOISE * work_of_step(d, 2 * n)
