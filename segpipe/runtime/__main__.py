"""Command line of the runtime.

    python -m segpipe.runtime selftest DIR
    python -m segpipe.runtime run DIR IMAGE|FOLDER|VIDEO... --out DIR
    python -m segpipe.runtime bench DIR [--frames N]

Exit codes: 0 ok, 1 a frame without an answer (an unreadable image is one; the next ones still run) or growing memory,
2 usage, 4 other answers than where the folder was exported, 7 altered files, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from .artifact import ArtifactError
from .bench import FLAT_MIB, bench
from .engines import ENGINES
from .frames import Result, Status
from .media import (
    Frame,
    OverlayVideo,
    files_of,
    frames_of,
    is_video,
    overlay,
    require_kept,
    write_picture,
)
from .segmenter import Segmenter


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command line; None takes the arguments of this process."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "run":
            require_kept(
                files_of([Path(source) for source in given.sources]), Path(given.out)
            )
            Path(given.out).mkdir(parents=True, exist_ok=True)
        segmenter = _load(given)
        return int(given.action(segmenter, given))
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130


def _load(given: argparse.Namespace) -> Segmenter:
    """The segmenter of a command, after saying what its export lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # told in a line, not with a place in the code
        segmenter = Segmenter.load(
            given.folder,
            threads=given.threads,
            precision=given.precision,
            deadline_ms=given.deadline_ms,
            engine=given.engine,
            providers=given.providers,
            frozen_after=0,  # files are not a camera: the same one twice is fine
        )
    if segmenter.artifact.caveat:
        print(f"warning: {segmenter.artifact.caveat}", file=sys.stderr)
    return segmenter


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="Use and check an exported folder."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text, action in (
        (
            "selftest",
            "compare checksums, then the golden answers on this machine",
            _selftest,
        ),
        (
            "run",
            "segment images, folders and videos; writes NAME_mask and NAME_overlay",
            _run,
        ),
        ("bench", "latency, its spread, and growth of memory", _bench),
    ):
        command = commands.add_parser(name, help=help_text)
        command.set_defaults(action=action)
        command.add_argument("folder", help="the exported folder, with SHA256SUMS")
        if name == "run":
            command.add_argument(
                "sources",
                nargs="+",
                help="images, folders of images, videos; .npy and .ppm need neither Pillow nor OpenCV",
            )
            command.add_argument("--out", required=True, help="folder for the pictures")
        if name == "bench":
            command.add_argument("--frames", type=_positive, default=300)
        command.add_argument("--threads", type=_positive, default=1)
        command.add_argument(
            "--precision", default="fp32", help="which ONNX file of the folder"
        )
        command.add_argument(
            "--engine", default="onnxruntime", help=" or ".join(ENGINES)
        )
        command.add_argument(
            "--providers",
            nargs="+",
            help="of onnxruntime, or one device of OpenVINO; without: CPU",
        )
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
    print(
        f"{artifact.model_id}: {artifact.num_files} files as exported, status {artifact.status}"
    )
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
        print(
            f"memory grew by {found['memory_growth_mib']} MiB; at most {FLAT_MIB} were expected",
            file=sys.stderr,
        )
    return 0 if answered and found["memory_flat"] is not False else 1


def _run(segmenter: Segmenter, given: argparse.Namespace) -> int:
    out = Path(given.out)
    answered = [
        (_run_video if is_video(path) else _run_image)(segmenter, path, out)
        for path in files_of([Path(source) for source in given.sources])
    ]
    return 0 if all(answered) else 1


def _run_image(segmenter: Segmenter, path: Path, out: Path) -> bool:
    """Write the pictures of one image; False when it has no answer."""
    (frame,) = frames_of(path)
    result = _answer(segmenter, frame)
    write_picture(out / f"{path.stem}_mask", result.mask)
    if frame.image is not None and result.status is Status.OK:
        write_picture(
            out / f"{path.stem}_overlay",
            overlay(frame.image, result.mask, segmenter.artifact.palette),
        )
    return result.status is Status.OK


def _run_video(segmenter: Segmenter, path: Path, out: Path) -> bool:
    """Write NAME_overlay.mp4 and a mask of every frame in NAME_mask/; False when a frame has no answer."""
    masks, answered = out / f"{path.stem}_mask", True
    masks.mkdir(exist_ok=True)
    with OverlayVideo(out / f"{path.stem}_overlay.mp4", path) as video:
        for number, frame in enumerate(frames_of(path)):
            result = _answer(segmenter, frame)
            answered &= result.status is Status.OK
            write_picture(masks / f"{number:06d}", result.mask)
            if frame.image is not None and result.mask.shape == frame.image.shape[:2]:
                video.add(overlay(frame.image, result.mask, segmenter.artifact.palette))
    return answered


def _answer(segmenter: Segmenter, frame: Frame) -> Result:
    """The result of a frame, or of one that cannot be read, after printing it."""
    result = (
        segmenter.refuse(Status.ERROR)
        if frame.image is None
        else segmenter.infer(frame.image)
    )
    print(f"{frame.name} {result.status} {result.latency_ms:.1f} ms")
    if frame.problem:
        print(frame.problem, file=sys.stderr)
    if frame.image is not None and result.status is not Status.OK:
        print(f"{frame.name}: {segmenter.last_error}", file=sys.stderr)
    return result


if __name__ == "__main__":
    sys.exit(main())
