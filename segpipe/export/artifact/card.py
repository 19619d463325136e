"""model_card.md: what the model is, what it was measured at, and what nobody has checked, on one page for people."""

from __future__ import annotations

from typing import Any

from segpipe.export.artifact.outcome import FEW_IMAGES, UNVERIFIED, caveat
from segpipe.export.graph.convert import Manifest


def model_card(manifest: Manifest) -> str:
    """Markdown made of the manifest, without time stamps and latencies: equal exports have equal cards."""
    blocks = [
        f"# {manifest['model']}: semantic segmentation into {len(manifest['classes'])} classes",
        _status(manifest["status"], manifest["real_images"]),
        _files(manifest["files"]),
        _interface(manifest),
        _calibration(manifest["calibration"]),
        _source(manifest["source"]),
        "## Quality",
        _quality(manifest["classes"], manifest["metrics"]),
        "## Limits",
        _limits(manifest),
    ]
    return "\n\n".join(blocks) + "\n"


def _status(status: str, real_images: int) -> str:
    if status == UNVERIFIED:
        return (
            f"Status: {status}. The files were compared with the trained network on made images alone; nobody has\n"
            "seen them segment a photograph. Run scripts/verify.py with the data set before use."
        )
    if status == FEW_IMAGES:
        return (
            f"Status: {status}. The files compute what the trained network computes, but were\n"
            f"{caveat(status, real_images)}. Run scripts/verify.py with more before use."
        )
    return (
        f"Status: {status}. The files compute what the trained network computes; verify_report.md has the\n"
        "figures, manifest.json has everything."
    )


def _files(files: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {entry['format']} | {entry['precision']} | {entry['bytes'] / 2**20:.1f} MiB |"
        for name, entry in files.items()
    ]
    return "\n".join(["| file | format | precision | size |", "|---|---|---|---|", *rows])


def _interface(manifest: Manifest) -> str:
    image = manifest["io"]["inputs"][0]
    lines = [
        f"- In: `{image['name']}`, {image['dtype']} {image['shape']}, {image['layout']}, {image['color_order']},",
        "  levels as the camera gives them; normalisation is inside.",
    ]
    for output in manifest["io"]["outputs"]:
        invalid = f"; {output['invalid']} means no answer" if "invalid" in output else ""
        lines.append(f"- Out: `{output['name']}`, {output['dtype']} {output['shape']}, {output['meaning']}{invalid}.")
    for axis, entry in manifest["io"].get("free", {}).items():
        end = f"to {entry['max']}" if "max" in entry else "on"
        tried = ", ".join(map(str, entry["tried"]))
        lines.append(f"- `{axis}`: multiples of {entry['multiple']} from {entry['min']} {end}; checked with {tried}.")
    return "\n".join(lines)


def _calibration(calibration: dict[str, Any]) -> str:
    if calibration["method"] == "none":
        return "Confidence is the plain softmax, not calibrated."
    return (
        f"Confidence is softmax(logits / {calibration['temperature']:.4g}), fitted on {calibration['images']} "
        f"validation images: expected calibration error {100 * calibration['ece_before']:.2f} % -> "
        f"{100 * calibration['ece_after']:.2f} %."
    )


def _source(source: dict[str, Any]) -> str:
    git = source["git"]
    if git:
        changed = " with changes" if git["dirty"] else ""
        commit = f"commit {git['commit']}{changed}, as of the {git['known_at']}"
    else:
        commit = "commit unknown"
    return (
        f"Trained for {source['step']} steps with seed {source['seed']}; {commit}; weights {source['weights_digest']}."
    )


def _quality(classes: list[dict[str, Any]], metrics: dict[str, Any] | None) -> str:
    if metrics is None:
        measured, iou = "Not known for these weights: run scripts/evaluate.py.", {}
    else:
        measured = (
            f"mIoU {_percent(metrics['miou'])} on the split {metrics['split']}, fp32, last validation of the run."
        )
        iou = metrics["iou"]
    rows = []
    for entry in classes:
        name, color = entry["name"].replace("|", "\\|"), bytes(entry["color"]).hex()
        rows.append(f"| {entry['id']} | {name} | #{color} | {_percent(iou.get(entry['name']))} |")
    return "\n".join([measured, "", "| id | class | colour | IoU |", "|---|---|---|---|", *rows])


def _limits(manifest: Manifest) -> str:
    frames, limits = manifest["frame_statistics"], manifest["frame_limits"]
    mean = ", ".join(f"{value:.0f}" for value in frames["mean"])
    lines = [
        f"- Not run on {', '.join(manifest['unverified'])}: there, repeat golden/ first.",
        "- A thing that is no class of the table still gets the id of one.",
    ]
    if not frames["images"]:
        return "\n".join([*lines, "- What frames should look like is not known: no image was at hand."])
    lines += [
        f"- Frames should look like the {frames['images']} {frames['source']} images: mean levels {mean} of RGB.",
        f"  The runtime refuses mean levels outside {limits['min_mean']:.0f} to {limits['max_mean']:.0f}.",
    ]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
