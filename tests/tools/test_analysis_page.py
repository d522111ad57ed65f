"""The pages in a real browser: figures, tables, no error, light and dark."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from typer.testing import CliRunner

from verl_ba.tools.analysis import charts, page
from verl_ba.tools.analysis.page import Figure, Section
from verl_ba.tools.cli import app
from verl_ba.tools.table import Table

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the path (Debian: apt-get install chromium)"
)
LIGHT, DARK = 1, 0  # the browser's own numbers


def browse(path: Path, profile: Path, *arguments, scheme=LIGHT):
    """Open a page in headless Chromium; its standard output, and the lines that its console printed."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--window-size=1100,1600",
        "--hide-scrollbars",
        *arguments,
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r"^.*:CONSOLE.*$", done.stderr, flags=re.MULTILINE)


class Outline(HTMLParser):
    """Counts elements, and collects what a table's cells say."""

    def __init__(self, text):
        super().__init__()
        self.count, self.cells, self.inside = {}, [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.inside = tag in ("td", "th")

    def handle_data(self, data):
        if self.inside and data.strip():
            self.cells.append(data.strip())


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of `analyze` and one of `compare`."""
    from tests.tools.test_analysis_rollouts import synthetic
    from tests.tools.test_compare import VALIDATION, file_log

    folder = tmp_path_factory.mktemp("pages")
    dump = synthetic(folder / "dump.jsonl", gap=1.4, variation=0.4, steps=4)
    runs = folder / "runs"
    runs.mkdir()
    for arm, level in (("balanced", 0.5), ("token", 0.45), ("sequence", 0.48), ("verl-token", 0.4)):
        for seed in (1, 2, 3):
            rising = [level * i / 20 + seed / 50 for i in range(1, 21)]
            more = {f"val-core/a-long/benchmark-name-{i}/acc/mean@32": rising for i in range(3)}
            more |= {
                VALIDATION: rising,
                "actor/pg_loss": [level / 10] * 20,
                "response_length/mean": [80.0 + level] * 20,
            }
            file_log(runs, f"{arm}-seed{seed}", rising, **more)
    for name, path in (("analyze", dump), ("compare", runs)):
        result = CliRunner().invoke(app, [name, str(path), "--out", str(folder), "--resamples", "50"])
        assert result.exit_code == 0, result.output
    return folder


@needs_chromium
@pytest.mark.parametrize(
    ("name", "figures", "tables", "cells"),
    [
        ("analyze", 3, 3, ["seq-mean-token-mean", "length variation within a sign (coefficient)", "dump.jsonl:"]),
        ("compare", 2, 3, ["verl-token", "balanced − token", "Qwen3-1.7B / DAPO-17k", "0.4695"]),
    ],
)
def test_a_page_has_its_figures_and_tables_and_no_console_error(pages, tmp_path, name, figures, tables, cells):
    text, console = browse(pages / f"{name}.html", tmp_path, "--dump-dom")
    outline = Outline(text)
    assert console == []
    assert outline.count["svg"] == figures
    assert outline.count["table"] == tables
    assert "script" not in outline.count
    for cell in cells:
        assert any(cell in found for found in outline.cells), cell
    source = (pages / f"{name}.html").read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', source)  # self-contained
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids))


@needs_chromium
def test_a_broken_page_is_seen(tmp_path):
    path = tmp_path / "broken.html"
    path.write_text("<script>nothing()</script>")
    _, console = browse(path, tmp_path / "profile", "--dump-dom")
    assert len(console) == 1
    assert "nothing is not defined" in console[0]


@needs_chromium
@pytest.mark.parametrize("name", ["analyze", "compare"])
def test_a_page_is_readable_in_light_and_in_dark(pages, tmp_path, name):
    shots = {}
    for scheme in (LIGHT, DARK):
        shot = tmp_path / f"{scheme}.png"
        browse(pages / f"{name}.html", tmp_path / f"profile{scheme}", f"--screenshot={shot}", scheme=scheme)
        shots[scheme] = imread(shot)[..., :3].mean(axis=-1)  # grey, 0 … 1
    assert np.median(shots[LIGHT]) > 0.9
    assert np.median(shots[DARK]) < 0.2
    # The same ink in both: what stands out from the paper in one scheme stands out in the other.
    ink = {scheme: np.abs(grey - np.median(grey)) > 0.25 for scheme, grey in shots.items()}
    assert ink[LIGHT].mean() > 0.02
    assert ink[DARK].mean() == pytest.approx(ink[LIGHT].mean(), rel=0.1)


def luminance(colour):
    """Relative luminance of '#rrggbb' (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_series_stand_out_from_light_and_dark_paper_and_differ_without_colour():
    for palette, paper in ((page.SERIES, "#fbfaf7"), ([page.DARK[c] for c in page.SERIES], "#191918")):
        for colour in palette:
            low, high = sorted((luminance(colour), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= 3, colour
    looks = list(charts.MODE_LOOKS.values())
    assert len({line for _, line, _ in looks}) == len({marker for _, _, marker in looks}) == len(looks)


def test_labels_do_not_overlap(pages):
    """Text of every figure, drawn: no two labels share a pixel, and none leaves the figure."""
    from verl_ba.tools.analysis import reports, rollouts, runs, weighing
    from verl_ba.tools.analysis.comparison import compare

    read = rollouts.read_rollouts([pages / "dump.jsonl"])
    sections = reports.weighing_sections(weighing.weigh(read, resamples=20), read)
    sections += reports.comparison_sections(compare(runs.read_runs([pages / "runs"]), resamples=20))
    figures = [figure for section in sections for figure in section.figures]
    assert len(figures) == 5
    for figure in figures:
        assert overlaps(figure.drawing) == [], figure.name
        for axis in figure.drawing.axes:
            if axis.get_visible():
                assert axis.get_xlabel(), figure.name
                assert axis.get_ylabel() or axis.get_yticklabels(), figure.name


def overlaps(drawing):
    """Labels that leave the figure, and pairs of labels that share a pixel."""
    FigureCanvasAgg(drawing).draw()
    hidden = undrawn(drawing)
    texts = [text for text in drawing.findobj(Text) if text.get_text() and text.get_visible() and text not in hidden]
    labels = [(text.get_text(), text.get_window_extent()) for text in texts]
    (x0, y0), (x1, y1) = drawing.bbox.get_points()
    left = [label for label, box in labels if box.x0 < x0 - 1 or box.y0 < y0 - 1 or box.x1 > x1 + 1 or box.y1 > y1 + 1]
    return left + [(a, b) for (a, p), (b, q) in combinations(labels, 2) if p.overlaps(q)]


def undrawn(drawing):
    """Texts that exist but are not drawn: of axes that are not shown, and of ticks beyond an axis's limits."""
    texts = set()
    for axes in drawing.axes:
        if not axes.get_visible():
            texts |= set(axes.findobj(Text))
        for axis in (axes.xaxis, axes.yaxis):
            drawn = {id(tick) for tick in axis._update_ticks()}
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if id(tick) not in drawn:
                    texts |= {tick.label1, tick.label2}
    return texts


def test_overlapping_labels_are_seen():
    with charts.axes() as (drawing, axes):
        axes[0].text(0.5, 0.5, "one")
        axes[0].text(0.5, 0.5, "another")
    assert ("one", "another") in overlaps(drawing)


def test_text_from_the_input_is_escaped():
    with charts.axes() as (drawing, _):
        figure = Figure("f", drawing, 'alt "quoted" <b>')
    section = Section("<s>", ["<p & q>"], [figure], [Table(("a|b",), [("<i>",)])])
    text = page.html("<t>", "<u>", [section])
    for raw in ("<s>", "<p & q>", "<i>", "<t>", "<u>", "<b>"):
        assert raw not in text.partition("<body>")[2]
    assert "a\\|b" in section.tables[0].markdown()
