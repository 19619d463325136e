"""Class ids of images of any size by an exported folder, whose file takes images of certain sizes only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

from segpipe.errors import ConfigError, ExportMismatch, IntegrityError
from segpipe.files import sha256
from segpipe.predict.outputs import Pixels, Predictor
from segpipe.predict.tiles import Size, Tiling
from segpipe.runtime.artifact import (
    MANIFEST,
    Artifact,
    ArtifactError,
    SelfTestError,
    UnusableError,
    read_artifact,
)
from segpipe.runtime.engines import EngineError
from segpipe.runtime.session import Session


class Exported:
    """The file of an exported folder, after it repeated its golden frames on this machine.

    An image of a size that the file takes is answered as a robot answers it. Any other one is cut into tiles of `tile`
    (the exported size if None), and each pixel gets its id from the tile in which it lies farthest from the edges; an
    image smaller than a tile is padded by its edge pixels. With `resize`, it is scaled to that size and its mask back.
    """

    def __init__(
        self,
        artifact: Artifact,
        session: Session,
        *,
        tile: Size | None,
        overlap: float,
        resize: bool,
    ):
        self.artifact = artifact
        self.tile: Size = tile or (
            artifact.shapes.exported[0],
            artifact.shapes.exported[1],
        )
        self.overlap = overlap
        self.resize = resize
        self.refitted = 0  # images of sizes that the file does not take
        self._session = session
        if not artifact.shapes.fits((*self.tile, 3)):
            raise ConfigError(
                f"tile = {self.tile[0]}x{self.tile[1]}, but the file in {artifact.folder} takes images of "
                f"{artifact.shapes.describe()}. Leave tile out, or export with export.dynamic=hw."
            )

    def __call__(self, image: Pixels) -> Pixels:
        """Class ids, uint8 (H, W)."""
        if self.artifact.shapes.fits(image.shape):
            return self._session.run(image)[0]
        self.refitted += 1
        return self._resized(image) if self.resize else self._in_tiles(image)

    def note(self) -> str:
        """How images of other sizes were answered; empty if there were none."""
        if not self.refitted:
            return ""
        how, other = (
            ("scaled to it", "tile cuts")
            if self.resize
            else ("cut into tiles of it", "resize scales")
        )
        size = "x".join(map(str, self.tile))
        return (
            f"{self.refitted} images or frames do not have the size {size} that the exported file answers. They were "
            f"{how} (fit={'resize' if self.resize else 'tile'}; fit={other} them instead)."
        )

    def _resized(self, image: Pixels) -> Pixels:
        height, width = image.shape[:2]
        shrinks = height * width > self.tile[0] * self.tile[1]
        kind = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        scaled = np.asarray(
            cv2.resize(image, self.tile[::-1], interpolation=kind), np.uint8
        )  # cv2 counts width first
        mask = self._session.run(scaled)[0]
        return np.asarray(
            cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST), np.uint8
        )

    def _in_tiles(self, image: Pixels) -> Pixels:
        size = image.shape[:2]
        missing = [
            max(0, tile - length) for tile, length in zip(self.tile, size, strict=True)
        ]
        image = np.pad(image, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
        tiling = Tiling.of((image.shape[0], image.shape[1]), self.tile, self.overlap)
        height, width = tiling.tile
        weights = replace(
            tiling, overlap=1.0
        ).weights()  # they rise up to the middle, so that no two tie
        ids, best = np.zeros(tiling.image, np.uint8), np.zeros(tiling.image, np.float32)
        for strip in tiling.strips():
            for left in strip.lefts:
                place = np.s_[strip.top : strip.top + height, left : left + width]
                found, better = (
                    self._session.run(np.ascontiguousarray(image[place]))[0],
                    weights > best[place],
                )
                ids[place] = np.where(better, found, ids[place])
                best[place] = np.maximum(best[place], weights)
        return ids[: size[0], : size[1]]


def load_exported(
    folder: Path,
    *,
    precision: str = "fp32",
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
    tile: Size | None = None,
    overlap: float = 0.25,
    resize: bool = False,
) -> Exported:
    """The exported folder, ready to answer.

    Raises IntegrityError for an altered or foreign folder, ExportMismatch when its file gives other answers on this
    machine than where it was exported, ConfigError for a provider or a tile that does not fit, or for a run.
    """
    if provider not in (available := onnxruntime.get_available_providers()):
        raise ConfigError(
            f"provider = {provider}, but this onnxruntime has {', '.join(available)}. Choose one of them."
        )
    _check_is_no_run(folder)
    try:
        artifact = read_artifact(folder, precision=precision)
        session = Session(artifact, threads=threads, providers=(provider,))
        session.self_test()
    except (
        EngineError,
        UnusableError,
    ) as error:  # such as an onnxruntime that is too old for the file
        raise ConfigError(str(error)) from error
    except SelfTestError as error:
        raise ExportMismatch(str(error)) from error
    except ArtifactError as error:
        raise IntegrityError(str(error)) from error
    return Exported(artifact, session, tile=tile, overlap=overlap, resize=resize)


def _check_is_no_run(folder: Path) -> None:
    if (folder / MANIFEST).is_file() or not any(
        (folder / name).is_file() for name in ("config.json", "last.pt")
    ):
        return
    exported = folder / "export"
    fix = (
        f"Set artifact={exported}"
        if exported.is_dir()
        else f"Export it first: segpipe export run={folder}"
    )
    raise ConfigError(
        f"artifact = {folder} is a run, but the folder of its export was needed. {fix}; or run={folder}."
    )


def of_exported(exported: Exported, *, precision: str) -> Predictor:
    """The file of an exported folder."""
    manifest, folder = exported.artifact.manifest, exported.artifact.folder
    classes = manifest["classes"]
    return Predictor(
        lambda images: [exported(image) for image in images],
        tuple(entry["name"] for entry in classes),
        tuple(tuple(entry["color"]) for entry in classes),
        {
            "weights_digest": manifest["source"]["weights_digest"],
            "artifact": exported.artifact.model_id,
            "manifest_sha256": sha256(folder / MANIFEST),
        },
        {
            "tile": "x".join(map(str, exported.tile)),
            "fit": "resize" if exported.resize else "tile",
            "overlap": exported.overlap,
            "precision": precision,
        },
        exported.note,
    )
