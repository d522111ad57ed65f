"""A number with its interval."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% bootstrap interval; bounds are nan where there is none, the value where it is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def text(self, form: str = ".3f") -> str:
        """'0.512 [0.490, 0.530]', without brackets where there is no interval; '–' for nan."""
        if math.isnan(self.value):
            return "–"
        value = format(self.value, form)
        return value if math.isnan(self.low) else f"{value} [{self.low:{form}}, {self.high:{form}}]"
