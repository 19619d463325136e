"""A page that compares runs: one table, and their curves in one picture each. Needs no network and no script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from segpipe.run.overview import RecipeGroup, Row, differing
from segpipe.run.pictures import plot_svg, thin
from segpipe.run.report import template
from segpipe.run.tracking import FILE_NAME, read_metrics
from segpipe.settings.setting import shown

# Readable on white and on black; more lines than these repeat the colors with dashes.
COLORS = (
    "#3b82f6",
    "#f59e0b",
    "#10b981",
    "#ef4444",
    "#8b5cf6",
    "#ec4899",
    "#14b8a6",
    "#a3a3a3",
)
LINES = 16  # runs or groups with curves
_POINTS = 120  # of a curve; more become means
_CURVES = (
    ("validation", "miou", "Validation mIoU, %"),
    ("train", "loss", "Training loss"),
)

Line = tuple[str, str, list[tuple[float, float]]]  # color, dashes, points


def render_overview(
    rows: Sequence[Row], groups: Sequence[RecipeGroup] = (), by: str = ""
) -> str:
    """The page for runs, or for groups of runs that differ in setting `by` alone."""
    shown_groups = groups if by else [RecipeGroup(row.settings, [row]) for row in rows]
    recipes = [group.settings for group in shown_groups]
    keys = differing(recipes)
    lines = [
        _style(place) if place < LINES else None for place in range(len(shown_groups))
    ]
    return template("overview.html.j2").render(
        number=len(rows),
        by=by,
        keys=keys,
        entries=[
            _entry(group, keys, by, line)
            for group, line in zip(shown_groups, lines, strict=True)
        ],
        curves=_pictures(shown_groups, lines),
        same=_common(recipes),
        left_out=max(len(shown_groups) - LINES, 0),
    )


def _style(place: int) -> tuple[str, str]:
    return COLORS[place % len(COLORS)], ("solid", "dashed")[place // len(COLORS) % 2]


def _entry(
    group: RecipeGroup, keys: Sequence[str], by: str, line: Any
) -> dict[str, Any]:
    """A line of the table."""
    members, scores = group.rows, group.scores
    return {
        "name": members[0].name
        if not by
        else ", ".join(shown(row.settings[by]) for row in group.distinct),
        "settings": [
            _compact(group.settings[key]) if group.settings else "-" for key in keys
        ],
        "mean": None if group.mean is None else f"{100 * group.mean:.2f}",
        "range": f"{100 * min(scores):.2f} to {100 * max(scores):.2f}"
        if len(scores) > 1
        else "",
        "number": f"{len(scores)} of {len(group.distinct)}",
        "steps": max((row.steps or 0 for row in members), default=0),
        "state": "; ".join(dict.fromkeys(row.state for row in members)),
        "reason": "; ".join(dict.fromkeys(row.reason for row in members if row.reason)),
        "line": line,
    }


def _compact(value: Any) -> str:
    """1e+06 for 1000000.0; six digits are enough to tell runs apart."""
    return f"{value:g}" if isinstance(value, float) else shown(value)


def _common(recipes: Sequence[Any]) -> dict[str, str]:
    """Settings that all runs share."""
    known = [recipe for recipe in recipes if recipe]
    different = differing(known)
    return (
        {key: shown(value) for key, value in known[0].items() if key not in different}
        if known
        else {}
    )


def _pictures(
    groups: Sequence[RecipeGroup], lines: Sequence[tuple[str, str] | None]
) -> list[dict[str, Any]]:
    histories = [
        [read_metrics(row.folder / FILE_NAME) for row in group.rows]
        for group in groups[:LINES]
    ]
    pictures = []
    for kind, key, title in _CURVES:
        drawn = [
            (*style, points)
            for style, members in zip(lines, histories, strict=False)
            for history in members
            if style and (points := _points(history, kind, key))
        ]
        if drawn:
            pictures.append(
                {
                    "title": title,
                    "svg": Markup(_svg(drawn, title, marker=key == "miou")),
                }
            )
    return pictures


def _points(history: Sequence[Any], kind: str, key: str) -> list[tuple[float, float]]:
    """At most _POINTS points (step, value); consecutive values become means."""
    scale = 100 if key == "miou" else 1
    found = [
        (float(line["step"]), scale * float(line[key]))
        for line in history
        if line["kind"] == kind and isinstance(line.get(key), int | float)
    ]
    return [(x, y) for x, y, _, _ in thin(found, _POINTS)]


def _svg(drawn: Sequence[Line], title: str, *, marker: bool) -> str:
    """All lines in one picture."""

    def draw(axes: Any) -> None:
        for color, dashes, points in drawn:
            x, y = zip(*points, strict=True)
            dot = "o" if marker or len(points) == 1 else None
            axes.plot(
                x,
                y,
                color=color,
                linestyle=dashes,
                linewidth=1.5,
                marker=dot,
                markersize=3.5,
                clip_on=False,
            )
        axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
        axes.set_xlabel("step", color="#888888")

    return plot_svg(draw, label=title, size=(5.4, 3.2))
