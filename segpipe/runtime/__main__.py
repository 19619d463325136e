"""Command line of the runtime.

    python -m segpipe.runtime selftest DIR
    python -m segpipe.runtime run DIR IMAGE... --out DIR
    python -m segpipe.runtime bench DIR [--frames N]

Exit codes: 0 ok, 1 a frame without an answer (an unreadable image is one; the next ones still run) or growing memory,
2 usage, 4 other answers than where the folder was exported, 7 altered files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .artifact import ArtifactError
from .bench import FLAT_MIB, bench
from .engines import ENGINES
from .frames import Status
from .segmenter import Segmenter

_ARRAY, _PLAIN = ".npy", ".ppm"  # read without Pillow
_PPM = re.compile(rb"P6\s+(?:#.*\n\s*)*(\d+)\s+(\d+)\s+255\s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command line; None takes the arguments of this process."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "run":
            _check_images([Path(image) for image in given.images])
            Path(given.out).mkdir(parents=True, exist_ok=True)
        segmenter = Segmenter.load(
            given.folder,
            threads=given.threads,
            precision=given.precision,
            deadline_ms=given.deadline_ms,
            engine=given.engine,
            providers=given.providers,
            frozen_after=0,  # files are not a camera: the same one twice is fine
        )
        return int(given.action(segmenter, given))
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="Use and check an exported folder.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text, action in (
        ("selftest", "compare checksums, then the golden answers on this machine", _selftest),
        ("run", "segment images; writes NAME_mask and NAME_overlay", _run),
        ("bench", "latency, its spread, and growth of memory", _bench),
    ):
        command = commands.add_parser(name, help=help_text)
        command.set_defaults(action=action)
        command.add_argument("folder", help="the exported folder, with SHA256SUMS")
        if name == "run":
            command.add_argument("images", nargs="+", help=".npy or .ppm; other formats with Pillow")
            command.add_argument("--out", required=True, help="folder for the pictures")
        if name == "bench":
            command.add_argument("--frames", type=_positive, default=300)
        command.add_argument("--threads", type=_positive, default=1)
        command.add_argument("--precision", default="fp32", help="which ONNX file of the folder")
        command.add_argument("--engine", default="onnxruntime", help=" or ".join(ENGINES))
        command.add_argument("--providers", nargs="+", help="of onnxruntime, or one device of OpenVINO; without: CPU")
        command.add_argument("--deadline-ms", type=float, default=None)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, but a number above 0 was needed")
    return number


def _selftest(segmenter: Segmenter, given: argparse.Namespace) -> int:
    agreement, levels = segmenter.session.self_test()
    artifact = segmenter.artifact
    print(f"{artifact.model_id}: {artifact.num_files} files as exported")
    print(
        f"{len(artifact.golden.image)} golden frames: at least {100 * agreement:.4g} % of the pixels equal, confidence "
        f"within {levels} levels"
    )
    return 0


def _bench(segmenter: Segmenter, given: argparse.Namespace) -> int:
    segmenter.frozen_after = 5  # time what a robot checks; the golden frames alternate
    found = bench(segmenter, given.frames, given.threads)
    print(json.dumps(found, indent=1))
    answered = found["statuses"].keys() <= {Status.OK}
    if found["memory_flat"] is False:
        print(f"memory grew by {found['memory_growth_mib']} MiB; at most {FLAT_MIB} were expected", file=sys.stderr)
    return 0 if answered and found["memory_flat"] is not False else 1


def _run(segmenter: Segmenter, given: argparse.Namespace) -> int:
    answered = [_run_one(segmenter, Path(image), Path(given.out)) for image in given.images]
    return 0 if all(answered) else 1


def _run_one(segmenter: Segmenter, path: Path, out: Path) -> bool:
    """Write the pictures of one image; False when it has no answer."""
    image = None
    try:
        image = read_image(path)
        result = segmenter.infer(image)
    except ValueError as error:  # from read_image; infer does not raise
        print(error, file=sys.stderr)
        result = segmenter.refuse(Status.ERROR)
    print(f"{path} {result.status} {result.latency_ms:.1f} ms")
    if image is not None and result.status is Status.BAD_SHAPE:
        size, needed = "x".join(map(str, image.shape[:2])), segmenter.artifact.shapes.describe()
        print(f"{path}: {size}, but {needed} was needed (height x width)", file=sys.stderr)
    _write_picture(out / f"{path.stem}_mask", result.mask)
    if image is not None and result.status is Status.OK:
        _write_picture(out / f"{path.stem}_overlay", _overlay(image, result.mask, segmenter.artifact.palette))
    return result.status is Status.OK


def _check_images(paths: Sequence[Path]) -> None:
    """Raise ValueError for a missing file, a format that needs Pillow, and two files whose masks would share a name."""
    stems: dict[str, Path] = {}
    for path in paths:
        if path.suffix not in (_ARRAY, _PLAIN):
            _pillow(path)
        if not path.is_file():
            raise ValueError(f"{path} cannot be read: no such file.")
        other = stems.setdefault(path.stem, path)
        if other != path:
            raise ValueError(f"{other} and {path} would both be written to {path.stem}_mask. Run them one by one.")


def read_image(path: Path) -> NDArray[np.uint8]:
    """Image as stored: uint8 (H, W, 3) RGB from a picture, any array from .npy. Raises ValueError with the path."""
    try:
        if path.suffix == _ARRAY:
            return np.asarray(np.load(path, allow_pickle=False))
        if path.suffix == _PLAIN:
            return _read_ppm(path)
        with _pillow(path).open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except Exception as error:  # Pillow raises SyntaxError, struct.error and its own types for damaged files
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}).") from None


def _read_ppm(path: Path) -> NDArray[np.uint8]:
    content = path.read_bytes()
    head = _PPM.match(content)
    if head is None:
        raise ValueError("a binary PPM (P6) with levels 0 to 255 was needed")
    width, height = int(head[1]), int(head[2])
    pixels = np.frombuffer(content, np.uint8, offset=head.end())
    if pixels.size < height * width * 3:
        raise ValueError(f"{pixels.size} bytes of pixels, {height * width * 3} were needed")
    return pixels[: height * width * 3].reshape(height, width, 3)


def _pillow(path: Path) -> Any:
    """The module PIL.Image, needed for `path`."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(f"{path}: without Pillow only {_ARRAY} and {_PLAIN} are read; pip install pillow.") from None
    return Image


def _write_picture(stem: Path, picture: NDArray[np.uint8]) -> None:
    """Write a PNG with Pillow; without it .ppm for (H, W, 3) and .pgm for (H, W)."""
    try:
        from PIL import Image
    except ImportError:
        suffix, kind = ("ppm", "P6") if picture.ndim == 3 else ("pgm", "P5")
        head = f"{kind}\n{picture.shape[1]} {picture.shape[0]}\n255\n".encode()
        stem.with_name(f"{stem.name}.{suffix}").write_bytes(head + picture.tobytes())
        return
    Image.fromarray(picture).save(stem.with_name(f"{stem.name}.png"))


def _overlay(image: NDArray[np.uint8], mask: NDArray[np.uint8], palette: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Average of the image and its class colors, uint8 (H, W, 3); black instead of a color where there is no answer."""
    colors = np.zeros((256, 3), dtype=np.uint16)
    colors[: len(palette)] = palette
    return ((image.astype(np.uint16) + colors[mask]) // 2).astype(np.uint8)


if __name__ == "__main__":
    sys.exit(main())
