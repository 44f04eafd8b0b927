"""Charts as SVG, drawn on the server, so that a browser needs no script. Their looks are in the style sheet."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from markupsafe import Markup, escape

WIDTH, HEIGHT = 720, 120
TOP = 8
LINES = ("first", "second", "third")


def bars(values: Sequence[tuple[datetime, float]], until: datetime, minutes: int, what: str) -> Markup:
    """Return a bar a minute for the `minutes` before `until`; minutes that are missing are empty."""
    of = {at.replace(second=0, microsecond=0): value for at, value in values}
    most = max(of.values(), default=0.0) or 1.0
    last = until.replace(second=0, microsecond=0)
    step = WIDTH / minutes
    drawn = []
    for nth in range(minutes):
        at = last - timedelta(minutes=minutes - 1 - nth)
        if value := of.get(at, 0.0):
            height = max((HEIGHT - TOP) * value / most, 1.0)
            title = Markup("<title>{} UTC: {} {}</title>").format(f"{at:%H:%M}", f"{value:,.0f}", what)
            drawn.append(
                Markup('<rect class="bar" x="{}" y="{}" width="{}" height="{}" rx="1">{}</rect>').format(
                    f"{nth * step + 0.5:.1f}", f"{HEIGHT - height:.1f}", f"{max(step - 1, 0.5):.1f}",
                    f"{height:.1f}", title,
                )
            )  # fmt: skip
    label = f"{what}, a bar a minute, the last {minutes} minutes; at most {most:,.0f} a minute"
    times = [last - timedelta(minutes=minutes - 1), last - timedelta(minutes=minutes // 2), last]
    return _svg(label, Markup("").join(drawn), f"{most:,.0f} a minute", [f"{at:%H:%M}" for at in times])


def lines(series: Sequence[Sequence[float]], times: Sequence[datetime], names: Sequence[str], unit: str) -> Markup:
    """Return a line for each series, the newest value at the right; all have one scale, and their values the times."""
    most = max((value for each in series for value in each), default=0.0) or 1.0
    drawn = []
    for nth, each in enumerate(series):
        if len(each) < 2:
            continue
        step = WIDTH / (len(each) - 1)
        points = " ".join(
            f"{at * step:.1f},{HEIGHT - 1 - (HEIGHT - TOP - 1) * value / most:.1f}" for at, value in enumerate(each)
        )
        drawn.append(Markup('<polyline class="line {}" points="{}"/>').format(LINES[nth], points))
    label = f"{', '.join(names)}; at most {most:,.1f} {unit}"
    ends = [f"{at:%H:%M:%S}" for at in (times[0], times[-1])] if times else []
    return _svg(label, Markup("").join(drawn), f"{most:,.1f} {unit}", ends)


def _svg(label: str, inside: Markup, most: str, times: Sequence[str]) -> Markup:
    """Return the chart below its scale and above its times. Texts stand beside it: within, they would be stretched."""
    below = Markup("").join(Markup("<span>{}</span>").format(each) for each in times)
    return Markup(
        '<div class="scale" aria-hidden="true">{}</div>'
        '<svg class="chart" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<line class="axis" x1="0" x2="{}" y1="{}" y2="{}"/>{}</svg>'
        '<div class="times" aria-hidden="true">{}<span>UTC</span></div>'
    ).format(most, WIDTH, HEIGHT, escape(label), WIDTH, HEIGHT - 0.5, HEIGHT - 0.5, inside, below)
