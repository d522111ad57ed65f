"""Numbers into words, tables and a figure."""

from verl_ba.aggregation import ALL_MODES
from verl_ba.tools.analysis import charts
from verl_ba.tools.analysis.page import INK, Figure, Section
from verl_ba.tools.gradients.measure import Measured
from verl_ba.tools.table import Table


def advice(m: Measured) -> list[str]:
    """What follows, and what does not."""
    first = (
        f"{m.favoured} agrees better with itself than the current mode, {m.current}: its split-half cosine is "
        f"higher by {m.gain[m.favoured].text('.4f')}."
        if m.favoured
        else f"No mode's split-half cosine is clearly above that of the current mode, {m.current}: these gradients give no "
        "reason to switch."
    )
    return [
        first,
        f"{m.updates} updates of {m.prompts} prompts whose responses differ in score. The measure sees noise, not bias: what "
        "every update of a mode has in common counts as signal, whether it is the reward's gradient or not. In our own study "
        "split halves ranked the rules mostly as the true gradient did, least well where right answers were rare.",
    ]


def table(m: Measured) -> Table:
    rows = [
        (
            mode,
            m.half[mode].text("+.4f"),
            "current" if mode == m.current else m.gain[mode].text("+.4f"),
            m.signal[mode].text("+.4f"),
            "1" if mode == m.current else m.turn[mode].text(".3f"),
        )
        for mode in ALL_MODES
    ]
    return Table(
        ("mode", "split-half cosine", f"less that of {m.current}", "signal to noise", f"cosine with {m.current}"),
        rows,
        "Split-half cosine: of the gradients of two updates that have no prompt in common, mean. Signal to noise: |E g|² "
        "over the variance of one update. Cosine: of an update with the same update under the current mode; 1: switching "
        "changes nothing. In brackets 95% intervals (jackknife over updates).",
    )


def figure(m: Measured) -> Figure:
    with charts.axes(columns=2, size=(9, 2.6)) as (drawing, panels):
        quantities = (
            (m.half, "Do two updates agree?", "split-half cosine"),
            (m.gain, f"Against {m.current}", "difference of the cosine"),
        )
        for axis, (values, title, label) in zip(panels, quantities, strict=True):
            for row, mode in enumerate(ALL_MODES):
                colour, _, marker = charts.MODE_LOOKS[mode]
                estimate = values[mode]
                axis.plot([estimate.low, estimate.high], [row, row], color=colour, linewidth=2.5)
                axis.plot(estimate.value, row, marker, color=colour, markersize=8)
            axis.axvline(0, color=INK, linewidth=1)
            axis.set(title=title, xlabel=label, ylim=(len(ALL_MODES) - 0.5, -0.5))
            axis.set_yticks(range(len(ALL_MODES)), list(ALL_MODES))
        panels[1].set_yticklabels([])
    return Figure(
        "halves",
        drawing,
        "Split-half cosine of the gradient under each mode, and its difference to the current mode's",
        "Dots: mean over pairs of updates without a common prompt; bars: 95% intervals (jackknife over updates).",
    )


def sections(m: Measured) -> list[Section]:
    return [
        Section("What this means", advice(m)),
        Section("Split halves", figures=[figure(m)], tables=[table(m)]),
    ]
