"""A table: a header, rows of text and a caption. The standard library alone, so that any tool can print one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{text}\n\n{self.caption}\n" if self.caption else f"{text}\n"
