"""The report page: self-contained, complete, safe against hostile names, and alive when data is missing."""

import base64
import hashlib
import html
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from segpipe.run import pages
from segpipe.run.folder import finished
from segpipe.run.pages import Picture
from segpipe.run.report import (
    LATEST,
    WORST,
    ReportData,
    advice,
    is_live,
    worst_images,
    write_report,
)
from segpipe.run.tracking import LivePage
from segpipe.settings.compose import compose
from segpipe.settings.config import Config

NAMES = ("road", "lane <mark>", "bus", "train")
PALETTE = ((128, 64, 128), (240, 240, 200), (0, 60, 160), (0, 80, 100))
COUNTS = np.array([[90, 10, 0, 7], [5, 45, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
VOID = {
    "area",
    "br",
    "col",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "circle",
    "line",
    "polyline",
    "polygon",
}


def render(data: ReportData) -> str:
    """The page as text."""
    with TemporaryDirectory() as folder:
        return write_report(Path(folder, "page.html"), data).read_text(encoding="utf8")


class Page(HTMLParser):
    """Every tag with its attributes, and all text; fails on a tag that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data + "\n"


def overlay(name: str, miou: float = 0.5) -> Picture:
    rng = np.random.default_rng(0)
    ids = rng.choice(np.array([0, 1, 255], np.uint8), (30, 60))
    return Picture(
        name,
        miou,
        rng.integers(0, 256, (30, 60, 3)).astype(np.uint8),
        ids,
        np.minimum(ids, 1),
    )


def make(name: str = "street_seed0", **changes: Any) -> ReportData:
    config = Config()
    config = replace(
        config,
        run=replace(config.run, name=name),
        optim=replace(config.optim, lr=0.0125),
    )
    history = [
        {"step": s, "kind": "train", "time_s": 1.0, "loss": 2 / s, "lr": 0.1 / s}
        for s in range(10, 100, 10)
    ]
    history += [
        {"step": s, "kind": "validation", "time_s": 1.0, "miou": s / 100}
        for s in (50, 90)
    ]
    data = ReportData(
        config=config,
        result={
            "steps": 8000, "train_seconds": 5400.0, "images_per_second": 412.71, "device": "cpu", "world_size": 2,
        },
        confusion=COUNTS,
        names=NAMES,
        palette=PALETTE,
        history=history,
        pictures={
            WORST: [overlay("worst_one", 0.125)],
            LATEST: [overlay("best_one", 0.875)],
        },
    )  # fmt: skip
    return replace(data, **changes)


def assert_self_contained(text: str) -> None:
    """One file, whose only script is named by its hash in the head: no other may run."""
    if "<script>" in text:
        script = text.split("<script>")[1].split("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in html.unescape(text)
        text = text.replace(f"<script>{script}</script>", "")
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {
        "script",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
    }
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "xlink:href", "srcset", "action", "data"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#"))
        # A file beside the page.
        assert re.fullmatch(r"[\w.-]*/?", attributes.get("href") or "")
    assert not re.search(
        r"https?:|url\(|@import|//\w", re.sub(r'"data:[^"]*"', "", text)
    )


def test_page_is_one_self_contained_file(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.html", make())
    assert list(tmp_path.iterdir()) == [path]
    text = path.read_text(encoding="utf-8")
    assert_self_contained(text)
    assert "default-src 'none'" in text  # the browser holds it to that
    assert text == render(make())  # same data, same bytes


@pytest.mark.parametrize(
    "leak",
    ['<img src="https://x.test/a.png">', "<script>1</script>", '<p onclick="x()"></p>'],
)
def test_the_check_above_sees_a_leak(leak: str) -> None:
    with pytest.raises(AssertionError):
        assert_self_contained(render(make()).replace("</main>", leak + "</main>"))


def test_page_says_what_was_found() -> None:
    text = Page(render(make())).text
    for value in (
        "77.7",
        "80.4",
        "75.0",
        "86.0 %",
    ):  # mean of 90/112 and 45/60; accuracy 135/157
        assert value in text
    for name in NAMES:
        assert name in text
    for wanted in (
        "street_seed0",
        "8,000",
        "90 min",
        "412.7",
        "optim.lr",
        "0.0125",
    ):
        assert wanted in text


def test_absent_classes_are_said_and_left_out() -> None:
    text = Page(render(make())).text
    assert "mean over 2 of 4 classes" in text
    assert (
        "absent from the validation images, excluded from the mean; never predicted"
        in text
    )
    assert "excluded from the mean; wrongly predicted in 7 pixels" in text
    everywhere = Page(render(make(confusion=np.full((4, 4), 9)))).text
    assert "absent" not in everywhere
    assert "mean over 4 classes" in everywhere


def test_both_kinds_of_overlays_and_the_legend_are_there() -> None:
    page = Page(render(make()))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    pictures = [image for image in images if ": " in (image["alt"] or "")]
    assert [picture["alt"] for picture in pictures] == [
        f"{name}: {kind}"
        for name in ("worst_one", "best_one")
        for kind in ("image", "prediction", "target", "errors")
    ]
    assert (
        len({picture["src"] for picture in pictures}) == 4
    )  # the two overlays hold the same pixels
    assert "mIoU 87.5 %" in page.text
    assert "mIoU 12.5 %" in page.text
    assert page.text.count("ignored") == 1


def test_the_legend_goes_by_id_and_the_table_by_iou() -> None:
    text = render(
        make(
            names=("a", "b", "c", "d"),
            confusion=np.array([[1, 9, 0, 0], [0, 9, 0, 0], [0] * 4, [0] * 4]),
        )
    )
    legend = text.split('<ul class="legend">')[1].split("</ul>")[0]
    assert re.findall(r"</i>(\w+)</li>", legend) == ["a", "b", "c", "d", "ignored"]
    table = text.split('<table class="classes">')[1].split("</table>")[0]
    assert re.findall(r"</i>(\w+)</th>", table) == [
        "b",
        "a",
        "c",
        "d",
    ]  # 0.5, 0.1, absent


def test_only_changed_settings_are_in_the_first_table() -> None:
    shown = render(make()).split("<h2>Configuration</h2>")[1].split("<details>")[0]
    assert re.findall(r"<th>([\w.]+)</th><td>", shown) == ["run.name", "optim.lr"]
    camvid = compose(["data=camvid", "data.root=x", "run.name=r"])
    shown = render(make(config=camvid)).split("<h2>Configuration</h2>")[1]
    changed = shown.split("<details>")[0]
    assert "augment.crop_size" not in changed, "the default is that of data=camvid"


@pytest.mark.parametrize("name", ["[/x]", "<b>", "{{ 7 * 7 }}", "{% for"])
def test_class_names_are_text(name: str) -> None:
    page = Page(render(make(names=(name, *NAMES[1:]))))
    assert (
        page.text.count(name) == 4
    )  # legend, classes, and both sides of the confusion matrix
    assert ("b", {}) not in page.tags


@pytest.mark.parametrize("place", ["name", "class", "overlay", "result", "config"])
def test_hostile_text_is_shown_not_run(place: str) -> None:
    evil = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"
    data = make(evil) if place == "name" else make()
    changes: dict[str, dict[str, Any]] = {
        "class": {"names": (evil, *NAMES[1:])},
        "overlay": {"pictures": {WORST: [overlay(evil)]}},
        "result": {"result": {"device": evil}},
        "config": {
            "config": replace(data.config, model=replace(data.config.model, name=evil))
        },
    }
    text = render(replace(data, **changes.get(place, {})))
    assert_self_contained(text)
    assert evil in Page(text).text


@pytest.mark.parametrize(
    "missing",
    [
        {"history": ()},
        {
            "history": [
                {
                    "step": 1,
                    "kind": "train",
                    "time_s": 0.0,
                    "loss": None,
                    "lr": math.nan,
                }
            ]
        },
        {"history": [{"step": 1, "kind": "train", "time_s": 0.0, "loss": 1.0}]},
        {"pictures": {}},
        {"pictures": {WORST: [overlay("one")], LATEST: []}},
        {"result": {}},
        {
            "result": {
                "steps": None,
                "train_seconds": math.nan,
                "images_per_second": "unknown",
            }
        },
        {
            "confusion": np.zeros((4, 4), np.int64),
            "pictures": {WORST: [overlay("void", math.nan)]},
        },
    ],
)
def test_missing_data_leaves_a_page_without_it(missing: dict[str, Any]) -> None:
    text = render(make(**missing))
    assert_self_contained(text)
    assert "nan" not in Page(text).text


def test_of_many_weak_classes_the_weakest_get_advice() -> None:
    names = [f"class_{k}" for k in range(30)]
    counts = np.diag(range(1, 31)) + 10
    data = make(confusion=counts, names=names, palette=[(k, k, k) for k in range(30)])
    html = render(data)
    assert html.count('<tr class="advice">') == 20
    assert "of its pixels are missed" not in html[: html.index(">class_20<")]


def test_many_classes_have_a_matrix_without_numbers() -> None:
    names = [f"class_{k}" for k in range(21)]
    data = make(
        confusion=np.eye(21, dtype=np.int64),
        names=names,
        palette=[(k, k, k) for k in range(21)],
    )
    cell = '<td class="hit" title="class_3 as class_3: 100 %" style="--s:1.00"></td>'
    assert cell in render(data)
    assert '<td class="hit" style="--s:1.00">100</td>' in render(
        make(confusion=np.eye(4, dtype=np.int64))
    )


def test_large_images_stay_small_on_the_page() -> None:
    big = overlay("big")
    big = replace(
        big,
        image=np.tile(big.image, (34, 34, 1)),
        target=np.tile(big.target, (34, 34)),
        pred=np.tile(big.pred, (34, 34)),
    )
    assert (
        len(render(make(pictures={WORST: [big] * 4, LATEST: [big] * 4}))) < 6_000_000
    )  # noise, which JPEG cannot compress


def test_importing_the_module_is_cheap() -> None:
    code = "import sys, segpipe.run.report; print([m for m in ('torch', 'matplotlib', 'cv2') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.strip() == "[]"


def test_sequences_interval_and_warning_are_on_the_page() -> None:
    result = {
        "images": 30,
        "interval_95": {"miou": [0.61, 0.64], "iou": {"road": [0.7, 0.72]}},
        "sequences": {
            "clear": {"images": 10, "miou": 0.75, "in_training": False},
            "<night>": {"images": 20, "miou": 0.25, "in_training": True},
        },
    }
    shown = render(make(result=result))
    text = Page(shown).text
    for wanted in (
        "61.0-64.0",
        "70.0-72.0",
        "30 images",
        "20 of 30 images are from sequences",
    ):
        assert wanted in text, wanted
    table = shown.split("<h2>Sequences</h2>")[1]
    assert table.index("night") < table.index("clear")  # the lowest first
    unseen = {
        "sequences": {"clear": {"images": 10, "miou": 0.75, "in_training": False}}
    }
    assert (
        "optimistic" not in render(make(result=unseen)).split("<h2>Sequences</h2>")[0]
    )


def test_a_weak_class_gets_one_sentence_with_evidence() -> None:
    counts = np.array([[900, 50, 0], [60, 30, 10], [1, 2, 7]])
    sentences = advice(counts, ("road", "lane", "pole"))
    assert list(sentences) == ["lane", "pole"]
    assert sentences["lane"].startswith(
        "70% of its pixels are missed, 60% are predicted as road; it is 9.43% of the labelled "
        "pixels. Check"
    )
    assert sentences["pole"].startswith(
        "59% of the pixels predicted as this class are wrong, 59% are lane; it is 0.94%"
    )
    assert "Try augment.rare_crop=0.5 or data.balance=0.5 or" in sentences["pole"]
    tried = ["augment.rare_crop", "loss.class_weights"]
    others = advice(counts, ("road", "lane", "pole"), tried)
    assert others["pole"].endswith("Try data.balance=0.5.")
    others = advice(counts, ("road", "lane", "pole"), [*tried, "data.balance"])
    assert others["pole"].endswith("separate the two classes.")
    assert advice(np.diag([5, 5, 0]), ("a", "b", "c")) == {}
    many = 150  # equally often, so none is rare
    text = advice(np.ones((many, many), np.int64), [f"c{k}" for k in range(many)])["c0"]
    assert "it is 0.67% of the labelled pixels. Train longer" in text
    assert (
        "60% are predicted as road"
        in Page(
            render(
                make(confusion=counts, names=("road", "lane", "pole"), palette=PALETTE)
            )
        ).text
    )


def test_only_the_worst_of_neighboring_frames_is_shown() -> None:
    def counts(right: int) -> np.ndarray:
        return np.array([[right, 100 - right], [0, 0]])

    right = dict.fromkeys(range(80), 50) | {40: 5, 41: 7, 43: 9, 55: 11}
    found = SimpleNamespace(per_image={k: counts(v) for k, v in right.items()})
    assert worst_images(found, 3) == [40, 55, 0]  # type: ignore[arg-type]
    found.per_image = {0: np.zeros((2, 2), int), 1: counts(3), 2: counts(1)}
    assert worst_images(found) == [2, 1]  # type: ignore[arg-type]


def test_a_living_page_loads_itself_again_and_nothing_else() -> None:
    history = [
        {"step": step, "kind": kind, "time_s": float(step), **figures}
        for step in (10, 20)
        for kind, figures in (
            ("train", {"loss": 1.0, "images_per_second": 12.5, "saved_step": 15}),
            ("memory", {"rss_mib": [700.0, 900.0]}),
            ("validation", {"miou": 0.25, "iou": {"road": 0.5, "bus": None}}),
        )
    ]
    data = make(result={"steps": 20}, history=history, live=True)
    text = render(data)
    assert_self_contained(text)
    assert "location.reload" in text
    shown = Page(text).text
    steps = Config().train.steps
    state = ("step 15", "to step 20, 2 processes agree")
    for wanted in (f"20 of {steps:,}", "12.5", "900 MiB", "over time", *state):
        assert wanted in shown
    data.config.compute.mode = "off"
    assert "to step 20" not in Page(render(data)).text
    final = render(replace(data, live=False))
    assert "location.reload" not in final
    assert "<script" not in render(replace(data, live=False, pictures={}))
    assert "data-live" not in final


def test_the_page_of_a_run_that_stops_does_not_wait_for_more(tmp_path: Path) -> None:
    config = compose([f"run.root={tmp_path}", "run.name=r", "run.exists=resume"])
    page, path = LivePage(), tmp_path / "r" / "report.html"
    page.on_start(config, 0)
    (tmp_path / "r").mkdir()
    line = {"step": 5, "kind": "validation", "time_s": 1.0, "miou": 0.5, "iou": {}}
    (tmp_path / "r" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    scores = {"confusion": COUNTS, "names": NAMES, "palette": PALETTE}
    pictures = [overlay("first"), overlay("second")]
    page.on_validation(5, scores, pictures)
    assert is_live(path)
    assert path.read_text().count('alt="first:') == 4
    result = {"steps": config.train.steps, "miou": 0.5}
    (tmp_path / "r" / "result.json").write_text(json.dumps(result))
    config.export.enabled = False
    assert not finished(config), "killed before its report"
    page.on_end(result)
    assert is_live(path), "the report of a finished run is not this page's to write"
    page.on_end({"exit_code": 6})
    assert not is_live(path)
    assert finished(config)


def _luminance(color: np.ndarray) -> float:
    linear = np.where(color <= 0.03928, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def _least_contrast(color: dict[str, np.ndarray], most: float) -> float:
    """Of ink on the card, mixed with up to `most` of either color."""
    contrasts = []
    for kind in ("accent", "warn"):
        for share in np.linspace(0, most, 21):
            mixed = share * color[kind] + (1 - share) * color["card"]
            dark, light = sorted((_luminance(mixed), _luminance(color["ink"])))
            contrasts.append((light + 0.05) / (dark + 0.05))
    return min(contrasts)


def test_numbers_of_the_confusion_matrix_have_the_contrast_of_aa() -> None:
    """4.5 to 1 of WCAG 2, light and dark; the control: with all of the color they would not."""
    css = Path(pages.__file__).with_name("page.css").read_text()
    most = re.findall(r"var\(--s\) \* (\d+)%", css)
    assert most == ["50", "50"]
    for scheme in re.findall(r"--page.*?}", css, re.DOTALL)[:2]:
        color = {
            name: np.array([int(text[k : k + 2], 16) / 255 for k in (0, 2, 4)])
            for name, text in re.findall(r"--(\w+): #(\w{6})", scheme)
        }
        assert _least_contrast(color, 0.5) >= 4.5
        assert _least_contrast(color, 1.0) < 4.5
        for text in ("good", "bad", "soft", "accent"):
            assert _least_contrast(color | {"ink": color[text]}, 0) >= 4.5, text


def test_cells_of_tables_do_not_shrink_to_a_letter_on_a_phone() -> None:
    """A cell that may break anywhere needs a least width: its table scrolls instead."""
    css = Path(pages.__file__).with_name("page.css").read_text()
    rules = re.findall(r"([^{}]*)\{([^{}]*overflow-wrap: anywhere[^{}]*)\}", css)
    cells = [rule for names, rule in rules if re.search(r"td|\.left|\.name", names)]
    assert len(cells) == 3
    assert all("min-width" in rule for rule in cells), cells


def test_words_of_a_chart_have_the_contrast_of_aa_and_its_steps_are_whole() -> None:
    """The colors of soft text, light and dark, of which the test above holds."""
    url = pages.chart("mIoU", {"": [(20, 0.1)]})
    drawn = base64.b64decode(url.partition(",")[2]).decode()
    css = Path(pages.__file__).with_name("page.css").read_text()
    light, dark = re.findall(r"--soft: (#\w{6})", css)
    assert f"fill: {light}" in drawn
    assert f"[style*='fill: {light}'] {{ fill: {dark} !important }}" in drawn
    assert re.findall(r"<!-- ([\d.]+) -->", drawn)[:3] == ["19", "20", "21"]


def test_the_brightest_pixels_stay_pale_in_the_picture_of_errors() -> None:
    """128 + 255 / 2 is rounded to 256, which is 0 as uint8: a black sky."""
    white = np.full((2, 2, 3), 255, np.uint8)
    right = np.zeros((2, 2), np.uint8)
    assert pages.errors(white, right, right, [(255, 0, 0)]).min() >= 254
