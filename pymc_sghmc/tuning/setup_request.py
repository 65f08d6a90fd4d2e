"""What a set-up is made for: two set-ups for equal requests are the same."""

from dataclasses import dataclass
from typing import Any

from pymc_sghmc.gradients.metric import Array, Metric
from pymc_sghmc.records import ByValue

__all__ = ["DataId", "SetupRequest"]


class DataId:
    """Identity of arrays: which memory they lie in, whatever is in it.

    It keeps the arrays alive, so that no other array can take their place in memory.
    """

    def __init__(self, arrays: tuple[Array, ...]) -> None:
        self._arrays = arrays

    @property
    def _places(self) -> tuple[Any, ...]:
        """Shapes and addresses, now: in another process they are others."""
        return tuple((array.shape, array.__array_interface__["data"]) for array in self._arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataId) and self._places == other._places

    def __hash__(self) -> int:
        return hash(self._places)

    def __deepcopy__(self, memo: Any) -> "DataId":
        return self  # copies of a step have the very same data


@dataclass(frozen=True, eq=False)
class SetupRequest(ByValue):
    """Everything that a set-up depends on, apart from the arguments of the step."""

    start: Array  # where the search for a fit begins, (d,)
    metric: Metric | None  # of an earlier fit: then ``start`` is the mean, and isn't searched for
    max_order: int  # of the control variates that may be used
    conditioned_on: tuple[Array, ...]  # values of other steps' parameters
    is_mode: bool = True  # whether that fit was one
    # Which data. None in what is saved of a chain: there it is whatever data the step has.
    data_id: DataId | None = None
