"""A self-contained HTML page: text, tables and figures; light and dark by the reader's own setting, no script.

Figures are drawn once, with the palette of `LIGHT`. In the page the colours become CSS variables, so the same SVG is drawn
in the reader's scheme.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from verl_ba.tools.table import Table

INK, FAINT = "#1b1b1a", "#8a8984"
SERIES = ("#0067b1", "#d1570b", "#007d5b", "#b0569a", "#7a6100", "#5b5b58")
"""Colours of series: after Okabe and Ito, for colour-blind readers; line styles and markers tell them apart in grey."""

DARK = {
    INK: "#ecebe6",
    FAINT: "#8a8984",
    SERIES[0]: "#5cb3f0",
    SERIES[1]: "#f4934f",
    SERIES[2]: "#3cc79a",
    SERIES[3]: "#e39ad0",
    SERIES[4]: "#d8bd4a",
    SERIES[5]: "#b9b8b2",
}
_VARIABLE = {colour: f"--c{i}" for i, colour in enumerate(DARK)}


@dataclass(frozen=True)
class Figure:
    """A drawn matplotlib figure; `alt` says in words what it shows, for readers who do not see it."""

    name: str
    drawing: Any
    alt: str
    caption: str = ""

    def png(self, path: Path) -> None:
        self.drawing.savefig(path, dpi=130, facecolor="white")

    def svg(self) -> str:
        """The figure as an SVG element: colours as CSS variables, ids that do not clash with another figure's."""
        buffer = io.StringIO()
        self.drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        for colour, variable in _VARIABLE.items():
            text = text.replace(colour, f"var({variable})")
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        return text.replace("<svg", '<svg role="img"', 1)


@dataclass
class Section:
    title: str
    paragraphs: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


_TEMPLATE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
:root { --paper: #fbfaf7; --line: #dddcd6; {% for v, c in light %}{{ v }}: {{ c }}; {% endfor %}}
@media (prefers-color-scheme: dark) {
  :root { --paper: #191918; --line: #3b3a37; {% for v, c in dark %}{{ v }}: {{ c }}; {% endfor %}}
}
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 66rem; background: var(--paper); color: var(--c0);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; overflow-wrap: anywhere; }
figure { margin: 1.25rem 0; }
figure svg { width: 100%; height: auto; }
figcaption { margin-top: .4rem; opacity: .75; font-size: .875rem; max-width: 46rem; }
.scroll { overflow-x: auto; margin: 1.25rem 0 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ subtitle }}</p>
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% for text in section.paragraphs %}
<p>{{ text }}</p>
{% endfor %}
{% for figure in section.figures %}
<figure aria-label="{{ figure.alt }}" id="figure-{{ figure.name }}">
{{ figure.svg() | safe }}
<figcaption>{{ figure.caption }}</figcaption>
</figure>
{% endfor %}
{% for table in section.tables %}
<figure>
<div class="scroll"><table>
<thead><tr>{% for cell in table.header %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
<figcaption>{{ table.caption }}</figcaption>
</figure>
{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""
)


def html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page as text."""
    return _TEMPLATE.render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        light=[(variable, colour) for colour, variable in _VARIABLE.items()],
        dark=[(variable, DARK[colour]) for colour, variable in _VARIABLE.items()],
    )
