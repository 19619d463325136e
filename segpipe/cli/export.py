"""`segpipe export`, `verify`, `weights`: export a trained network to files that compute the same, and check them."""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save

from segpipe import __version__
from segpipe.cli.commands import Given
from segpipe.errors import ConfigError, DataError, ExportMismatch, WeightsError
from segpipe.export.artifact.place import sums_line
from segpipe.export.dataset import gather, training_images, validation_samples
from segpipe.export.publish import export_checkpoint
from segpipe.export.verify import image_size, read_manifest, verify_folder
from segpipe.export.verify_report import (
    FOLDER,
    NOT_EXPORTED,
    NOT_VERIFIED,
    ExportReport,
    integrity_refusal,
)
from segpipe.files import file_sha256, write_atomically
from segpipe.ledger.inputs import changed_since
from segpipe.models.weights import FORMAT, published_key
from segpipe.run.console import CONSOLE, ERRORS
from segpipe.settings.compose import with_settings
from segpipe.train.checkpoint import TrainedNetwork, load_network

SUFFIX = ".safetensors"


def main(given: Given) -> int:
    """Exit code of `segpipe export`."""
    report = export(given)
    _print(report, "EXPORT", report.manifest.get("warnings", []))
    return 0


def export(given: Given) -> ExportReport:
    """Export a run; returns the published folder and the result of every gate."""
    run = Path(given["run"])
    trained = _load(run, given["which"], NOT_EXPORTED)
    config = with_settings(trained.config, given)
    return export_checkpoint(
        run,
        trained,
        config,
        validation=validation_samples(config, trained.classes),
        training=training_images(config),
    )


def _load(run: Path, which: str, verdict: str) -> TrainedNetwork:
    """The network of a run. Missing, unexpected or misshaped tensors fail gate G1."""
    try:
        return load_network(run, which)
    except WeightsError as error:
        raise integrity_refusal(verdict, [str(error)], "the checkpoint") from error


def verify_main(given: Given) -> int:
    """Exit code of `segpipe verify`."""
    _print(verify(given), "ARTIFACT", [])
    return 0


def _print(report: ExportReport, what: str, warnings: Sequence[str]) -> None:
    CONSOLE.print(report.table())
    for warning in warnings:
        ERRORS.print(f"warning: {warning}.")
    print(sums_line(report.folder))
    print(report.line(what))


def verify(given: Given, *, engines: Sequence[str] = ()) -> ExportReport:
    """Report of all gates. Raises the error of the first gate that fails.

    engines: further names that the caller added to `segpipe.runtime.engines.ENGINES`, besides `export.engines`.
    """
    run, folder = Path(given["run"]), Path(given["artifact"])
    trained = _load(run, given["which"], NOT_VERIFIED)
    config = with_settings(trained.config, given)
    config.export.engines = [*config.export.engines, *engines]
    manifest = read_manifest(folder)
    samples = validation_samples(config, trained.classes)
    changed = samples and changed_since(run, trained.config.data, config.data)
    try:
        report = verify_folder(
            trained,
            folder,
            manifest,
            gather(samples, config, image_size(manifest)),
            train_images=training_images(config),
        )
    except ExportMismatch as error:
        # The folder's claims and the quality gate depend on the images; agreement with the checkpoint does not.
        of_images = all(
            name == FOLDER or gate.gate == "G5" for name, gate in error.failed
        )
        if not changed or not of_images:
            raise
        raise DataError(
            f"{changed}. {folder} cannot be compared on these images ({error}). Restore the images, or export again."
        ) from error
    if changed:
        ERRORS.print(f"warning: {changed}.")
    return report


def weights_main(given: Given) -> int:
    """Exit code of `segpipe weights`."""
    out = Path(given["out"])
    if out.suffix != SUFFIX:
        raise ConfigError(
            f"out = {out}, but a file name ending in {SUFFIX} was needed. Set out={out.with_suffix(SUFFIX)}."
        )
    if out.exists():
        raise ConfigError(
            f"out = {out} already exists. Choose another name, or delete it."
        )
    trained = load_network(Path(given["run"]), given["which"])
    original = given["names"] == "original"
    keys = trained.model.published_keys if original else ()
    if original and not keys:
        raise ConfigError(
            f"names = original, but {trained.config.model.name} has no original names. Remove names."
        )
    # safetensors refuses tensors that share memory.
    tensors = {
        published_key(name, keys): value.clone().contiguous()
        for name, value in trained.model.state_dict().items()
    }
    write_atomically(out, _sorted(save(tensors, metadata=_metadata(trained, given))))
    print(
        f"{out}: {len(tensors)} tensors of {trained.config.model.name} after {trained.step} updates"
    )
    print(f"{file_sha256(out)}  {out}")
    return 0


def _sorted(content: bytes) -> bytes:
    """A safetensors file with a sorted header. The library's order changes from call to call, and with it the hash."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[end:]


def _metadata(trained: TrainedNetwork, given: Given) -> dict[str, str]:
    """What a reader of the file needs, as text: the header of safetensors holds only text."""
    model, classes = trained.config.model, trained.classes
    return {
        "format": FORMAT,
        "segpipe": __version__,
        "run": trained.config.run.name,
        "which": given["which"],
        "step": str(trained.step),
        "ema_digest": trained.ema_digest,
        "model": model.name,
        "args": json.dumps(model.args),
        "classes": json.dumps(classes.names),
        "palette": json.dumps(classes.palette),
        "input": "float RGB (B, 3, H, W), mean 0 and variance 1 of each image"
        if model.standardize
        else "float RGB (B, 3, H, W), (x / 255 - mean) / std, mean 0.485 0.456 0.406, std 0.229 0.224 0.225",
        "standardize": json.dumps(model.standardize),
        "output_stride": str(trained.model.output_stride),
        "align_corners": json.dumps(trained.model.align_corners),
    }
