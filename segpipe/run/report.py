"""runs/NAME/report.html: what came out of a run, on one page that needs no network, no server and no script.

Everything is inside the file: pictures as `data:` addresses, curves as SVG, the style as CSS. A content security policy
in its head forbids the browser to load anything else, so the page can be mailed or archived as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe.run.pictures import blend, curve_svg, jpeg_url, shrink
from segpipe.settings.config import Config, to_mapping

_PANEL_WIDTH = 480  # pixels of an overlay; 24 of them stay below 2 MB
_NUMBERED_CLASSES = 20  # above this many classes a cell is too small for its number


@dataclass(frozen=True)
class Overlay:
    """One validation image with what was wanted and what came out."""

    name: str
    miou: float
    image: NDArray[np.uint8]  # (H, W, 3) RGB
    target: NDArray[np.uint8]  # (H, W), 255 ignored
    pred: NDArray[np.uint8]  # (H, W)


@dataclass(frozen=True)
class ReportData:
    """What the page is made of; everything but the first five may be missing."""

    config: Mapping[str, Any]  # nested, as in config.json
    result: Mapping[str, Any]  # result.json: steps, wall_time_s, images_per_s, device, world_size are shown on top
    confusion: NDArray[np.int64]  # (C, C), rows target, columns prediction
    names: Sequence[str]
    palette: Sequence[tuple[int, int, int]]
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    best: Sequence[Overlay] = ()
    worst: Sequence[Overlay] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def pick_extremes(per_image: Sequence[tuple[int, float]], count: int = 4) -> tuple[list[int], list[int]]:
    """Indices of the best and of the worst images, each from its extreme inwards; none is in both.

    `per_image` holds (index, mIoU); NaN (nothing labelled) is left out, equal values go by index.
    """
    valued = [(index, value) for index, value in per_image if not math.isnan(value)]
    falling = [index for index, _ in sorted(valued, key=lambda pair: (-pair[1], pair[0]))]
    rising = [index for index, _ in sorted(valued, key=lambda pair: (pair[1], pair[0]))]
    best = falling[: min(count, (len(valued) + 1) // 2)]
    return best, [index for index in rising if index not in best][:count]


def write_report(run_dir: Path, data: ReportData) -> Path:
    """Path of the written RUN_DIR/report.html; a page that was there is replaced in one move."""
    path = run_dir / "report.html"
    draft = path.with_name(path.name + ".partial")
    draft.write_text(render(data), encoding="utf-8")
    os.replace(draft, path)
    return path


def render(data: ReportData) -> str:
    """The page as text. All text from outside is escaped; the same data gives the same bytes."""
    name = str(data.config.get("run", {}).get("name", "run"))
    sections = [
        _headline(name, data),
        _section("Training", _curves(data.history)),
        _section("Classes", _class_bars(data)),
        _section("Confusion", _confusion(data)),
        _section("Best validation images", _overlays(data.best, data, legend=True)),
        _section("Worst validation images", _overlays(data.worst, data, legend=not data.best)),
        _section("Configuration", _config_tables(data.config)),
        _section("Record", _details("Result", data.result) + _details("Versions", data.versions)),
    ]
    return _PAGE.format(title=escape(name), style=_STYLE, body="\n".join(filter(None, sections)))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _percent(value: float | None, digits: int = 1) -> str:
    return "n/a" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if hours < 2 else f"{hours:.1f} h"


def _headline(name: str, data: ReportData) -> str:
    from segpipe.train.metrics import summary  # torch: not needed to import this module

    found, result = summary(data.confusion, data.names), data.result
    model, source = (data.config.get(group, {}).get("name", "") for group in ("model", "data"))
    about = [
        str(model),
        f"on {source}" if source else "",
        f"seed {data.config['seed']}" if "seed" in data.config else "",
    ]
    tiles = [("pixel accuracy", f"{_percent(found['pixel_accuracy'])} %")]
    for key, label, form in _TILES:
        value = result.get(key)
        if isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value)):
            tiles.append((label, escape(value if isinstance(value, str) else form(value))))
    present = len(data.names) - len(found["absent"])
    counted = f"mean over {present} of {len(data.names)} classes" if found["absent"] else f"mean over {present} classes"
    cells = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in tiles)
    return (
        f"<header><div><h1>{escape(name)}</h1><p>{escape(' · '.join(filter(None, about)))}</p></div>"
        f'<div class="top"><p class="miou"><strong>{_percent(found["miou"])}</strong>'
        f"<span>% mIoU<br><small>{counted}</small></span></p><dl>{cells}</dl></div></header>"
    )


_TILES = (
    ("steps", "steps", lambda value: f"{value:,}"),
    ("wall_time_s", "training", _duration),
    ("images_per_s", "images / s", lambda value: f"{value:,.1f}"),
    ("device", "device", str),
    ("world_size", "processes", str),
)


def _curves(history: Sequence[Mapping[str, Any]]) -> str:
    figures = []
    for key, title, dots, scale in (
        ("loss", "Loss", False, 1),
        ("lr", "Learning rate", False, 1),
        ("miou", "Validation mIoU, %", True, 100),
    ):
        kind = "validation" if key == "miou" else "train"
        lines = [line for line in history if line.get("kind") == kind and isinstance(line.get(key), int | float)]
        points = [(line["step"], scale * line[key]) for line in lines if math.isfinite(line[key])]
        if points:
            last = (
                f"<span>{'best' if dots else 'last'} {max(y for _, y in points) if dots else points[-1][1]:.3g}</span>"
            )
            svg = curve_svg(points, label=f"{title} over steps", dots=dots)
            figures.append(f"<figure><figcaption>{title}{last}</figcaption>{svg}</figure>")
    return f'<div class="cards">{"".join(figures)}</div>' if figures else ""


def _swatch(color: tuple[int, int, int]) -> str:
    return f'<i class="swatch" style="background:rgb{tuple(int(part) for part in color)}"></i>'


def _class_bars(data: ReportData) -> str:
    from segpipe.train.metrics import iou_per_class

    counts = np.asarray(data.confusion)
    target_pixels, predicted_pixels = counts.sum(axis=1), counts.sum(axis=0)
    total = max(int(target_pixels.sum()), 1)
    iou = iou_per_class(counts)
    order = sorted(range(len(iou)), key=lambda k: (iou[k] is None, -(iou[k] or 0.0), k))
    rows = []
    for k in order:
        value, share = iou[k], f"{100 * int(target_pixels[k]) / total:.2f} %"
        if value is None:
            note = (
                f"predicted in {int(predicted_pixels[k]):,} pixels nevertheless"
                if predicted_pixels[k]
                else "never predicted"
            )
            bar = f'<td class="absent" colspan="3">absent from the validation images, left out of the mean; {note}</td>'
        else:
            color = f"background:rgb{tuple(int(part) for part in data.palette[k])}"
            bar = (
                f'<td class="bar"><div><b style="width:{100 * value:.1f}%;{color}"></b></div></td>'
                f"<td>{_percent(value)}</td><td>{share}</td>"
            )
        rows.append(f"<tr><th>{_swatch(data.palette[k])}{escape(data.names[k])}</th>{bar}</tr>")
    head = "<tr><th>class</th><th></th><th>IoU, %</th><th>pixels</th></tr>"
    return f'<div class="scroll"><table class="classes">{head}{"".join(rows)}</table></div>'


def _confusion(data: ReportData) -> str:
    """Row-normalised matrix as a table; the diagonal in the accent colour, mistakes in the warning one."""
    counts = np.asarray(data.confusion, np.float64)
    rates = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    numbered = len(data.names) <= _NUMBERED_CLASSES
    heads = "".join(f"<th><span>{escape(name)}</span></th>" for name in data.names)
    rows = []
    for k, name in enumerate(data.names):
        cells = "".join(_confusion_cell(rate, hit=k == other, numbered=numbered) for other, rate in enumerate(rates[k]))
        absent = "" if counts[k].any() else ' class="absent"'
        rows.append(f"<tr{absent}><th>{escape(name)}</th>{cells}</tr>")
    kind = "matrix" if numbered else "matrix dense"
    return (
        "<p>Of the pixels of each row's class, the percentage that was predicted as each column's class; "
        "an empty row is a class that the validation images do not hold.</p>"
        f'<div class="scroll"><table class="{kind}"><tr><td></td>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _confusion_cell(rate: float, *, hit: bool, numbered: bool) -> str:
    if rate < 0.005:
        return "<td></td>"
    # The square root keeps a confusion of 3 % visible beside one of 60 %.
    strength = math.sqrt(rate)
    kind = ("hit" if hit else "miss") + (" strong" if strength > 0.6 else "")
    return f'<td class="{kind}" style="--s:{strength:.2f}">{f"{100 * rate:.0f}" if numbered else ""}</td>'


def _overlays(overlays: Sequence[Overlay], data: ReportData, *, legend: bool) -> str:
    rows = []
    for overlay in overlays:
        image = shrink(overlay.image, _PANEL_WIDTH, smooth=True)
        panels = [
            ("image", image),
            ("target", blend(image, shrink(overlay.target, _PANEL_WIDTH, smooth=False), data.palette)),
            ("prediction", blend(image, shrink(overlay.pred, _PANEL_WIDTH, smooth=False), data.palette)),
        ]
        name = escape(overlay.name)
        pictures = "".join(
            f'<span><img src="{jpeg_url(picture)}" alt="{name}: {kind}" loading="lazy"><small>{kind}</small></span>'
            for kind, picture in panels
        )
        caption = f"<figcaption>{name}<span>mIoU {_percent(overlay.miou)} %</span></figcaption>"
        rows.append(f'<figure class="overlay">{caption}<div>{pictures}</div></figure>')
    return (_legend(data) if legend and rows else "") + "".join(rows)


def _legend(data: ReportData) -> str:
    items = [f"<li>{_swatch(color)}{escape(name)}</li>" for name, color in zip(data.names, data.palette, strict=True)]
    return f'<ul class="legend">{"".join(items)}<li><i class="swatch ignored"></i>ignored</li></ul>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _config_tables(config: Mapping[str, Any]) -> str:
    default = dict(_flat(to_mapping(Config())))
    current = dict(_flat(config))
    changed = [(key, value, default.get(key)) for key, value in current.items() if default.get(key) != value]
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td><mark>{_text(value)}</mark></td><td>{_text(usual)}</td></tr>"
        for key, value, usual in changed
    )
    table = f"<table class='pairs'><tr><th>setting</th><th>value</th><th>default</th></tr>{rows}</table>"
    shown = f'<div class="scroll">{table}</div>' if changed else "<p>Every setting has its default value.</p>"
    return shown + _details(f"All {len(current)} settings", config, marked={key for key, _, _ in changed})


def _details(title: str, values: Mapping[str, Any], marked: set[str] | frozenset[str] = frozenset()) -> str:
    if not values:
        return ""
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{f'<mark>{_text(value)}</mark>' if key in marked else _text(value)}</td></tr>"
        for key, value in _flat(values)
    )
    summary = f"<summary>{escape(title)}</summary>"
    return f'<details>{summary}<div class="scroll"><table class="pairs">{rows}</table></div></details>'


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "n/a"
    return "none" if value in ("", None) else escape(str(value))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #16191f; --soft: #5d6675; --rule: #e1e5eb;
  --accent: #2563eb; --warn: #e2590f; --mark: #fdf0c4; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #181c22; --ink: #e8ebf0; --soft: #98a2b1;
  --rule: #2a3039; --accent: #6096ff; --warn: #ff8a47; --mark: #4b3f14; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 64px; }
header, section { background: var(--card); border: 1px solid var(--rule); border-radius: 14px; padding: 24px 28px;
  margin-bottom: 20px; }
h1 { margin: 0; font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { margin: 0 0 14px; font-size: 1.1rem; }
p { margin: 0 0 12px; color: var(--soft); }
.top { display: flex; flex-wrap: wrap; gap: 20px 48px; align-items: center; margin-top: 12px; }
.miou { display: flex; align-items: center; gap: 12px; margin: 0; line-height: 1.25; color: var(--ink); }
.miou strong { font-size: 4.2rem; line-height: 1; letter-spacing: -.03em; color: var(--accent); }
small, dt { color: var(--soft); font-size: .8rem; }
dl { display: flex; flex-wrap: wrap; gap: 14px 36px; margin: 0; }
dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); gap: 24px; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; justify-content: space-between; gap: 12px; font-weight: 600; overflow-wrap: anywhere; }
figcaption span { color: var(--soft); font-weight: 400; white-space: nowrap; }
.curve { display: block; width: 100%; height: auto; }
.curve text { fill: var(--soft) !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 400; }
.swatch { display: inline-block; width: 13px; height: 13px; border-radius: 4px; margin-right: 9px;
  vertical-align: -1px; border: 1px solid rgb(128 128 128 / .5); }
.ignored { background: repeating-linear-gradient(45deg, #181818 0 3px, #606060 3px 4.5px); }
.classes { width: 100%; }
.classes th, .classes td { padding: 4px 10px 4px 0; white-space: nowrap; }
.classes td { text-align: right; }
.classes tr:first-child th { color: var(--soft); font-size: .8rem; text-align: right; }
.classes tr:first-child th:first-child { text-align: left; }
.classes td:last-child { color: var(--soft); }
.classes .bar { width: 100%; min-width: 90px; }
.classes .absent { text-align: left; color: var(--soft); white-space: normal; font-style: italic; }
.bar div { background: var(--rule); border-radius: 5px; height: 14px; overflow: hidden; }
.bar b { display: block; height: 100%; border-radius: 5px; box-shadow: inset 0 0 0 1px rgb(128 128 128 / .5); }
.matrix { width: 100%; max-width: 900px; table-layout: auto; }
.matrix td { min-width: 34px; height: 30px; text-align: center; font-size: .8rem;
  border: 2px solid var(--card); border-radius: 6px; background-color: rgb(128 128 128 / .07); }
.matrix tr:first-child td { background: none; }
.matrix th { padding-right: 10px; white-space: nowrap; font-size: .85rem; }
.matrix tr:first-child th { padding: 0 0 6px; vertical-align: bottom; text-align: center; }
.matrix tr:first-child span { writing-mode: vertical-rl; transform: rotate(180deg); }
.matrix .absent th { color: var(--soft); font-style: italic; }
.matrix .absent td { background: none; }
.matrix .hit { background: color-mix(in srgb, var(--accent) calc(var(--s) * 100%), transparent); }
.matrix .miss { background: color-mix(in srgb, var(--warn) calc(var(--s) * 100%), transparent); }
.matrix .strong { color: #fff; font-weight: 600; }
.dense td { width: auto; min-width: 6px; height: 12px; border-width: 1px; border-radius: 0; }
.dense th { font-size: .65rem; line-height: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 0 0 18px; padding: 0; list-style: none; }
.overlay { margin-bottom: 22px; }
.overlay div { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px; margin-top: 6px; }
.overlay img { display: block; width: 100%; border-radius: 8px; }
.pairs th, .pairs td { padding: 4px 24px 4px 0; vertical-align: top; border-bottom: 1px solid var(--rule); }
.pairs th, .pairs td { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.pairs td + td { color: var(--soft); }
mark { background: var(--mark); color: inherit; padding: 1px 6px; border-radius: 5px; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--soft); }
@media (max-width: 640px) { main { padding: 12px 10px; } header, section { padding: 18px 16px; }
  .overlay div { grid-template-columns: 1fr; } .miou strong { font-size: 3.2rem; } }
"""
