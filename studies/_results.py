"""The files of numbers in studies/results. The older ones name rules by their short names; read, they are modes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies.simulated import Mean
from verl_ba.tools.analysis.modes import in_full
from verl_ba.tools.analysis.page import Figure

HERE = Path(__file__).parent


def to_json(results: dict[str, Any]) -> str:
    """A mean becomes {value, error, spread}."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mean):
            return {name: round(number, 6) for name, number in asdict(value).items()}
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        return round(value, 6) if isinstance(value, float) else value

    return json.dumps(plain(results), indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> dict[str, Any]:
    """The inverse of `to_json`; a rule's short name becomes its mode."""

    def rich(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() == {"value", "error", "spread"}:
            return Mean(**value)
        return {int(key) if key.isdecimal() else in_full(key): rich(item) for key, item in value.items()}

    return rich(json.loads(text))


def committed(name: str) -> dict[str, Any]:
    """The numbers of a study. Raises FileNotFoundError where it was not run."""
    return from_json((HERE / "results" / f"{name}.json").read_text())


def write(out: Path, name: str, numbers: str, text: str, drawings: list[Figure]) -> None:
    """The numbers and the tables into `out`/results, the figures into `out`/figures."""
    for folder in ("results", "figures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    (out / "results" / f"{name}.json").write_text(numbers)
    (out / "results" / f"{name}.md").write_text(text)
    for drawing in drawings:
        drawing.png(out / "figures" / f"{drawing.name}.png")
