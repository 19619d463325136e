"""Command line of the runtime.

    python -m segpipe.runtime selftest DIR
    python -m segpipe.runtime run DIR IMAGE|FOLDER... --out DIR
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
from .frames import Status
from .images import files_of, overlay, read_image, write_picture
from .segmenter import Segmenter


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command line; None takes the arguments of this process."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.action(given))
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="Use and check an exported folder."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, action: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(action=action)
        command.add_argument("folder", help="the exported folder, with SHA256SUMS")
        command.add_argument("--threads", type=int, default=1)
        command.add_argument("--precision", default="fp32", help="of the ONNX file")
        engines = " or ".join(ENGINES)
        command.add_argument("--engine", default="onnxruntime", help=engines)
        devices = "of onnxruntime, or one device of OpenVINO; without: CPU"
        command.add_argument("--providers", nargs="+", help=devices)
        command.add_argument("--deadline-ms", type=float)
        return command

    add("selftest", _selftest, "compare checksums, then the golden answers")
    run = add("run", _run, "segment images; writes NAME_mask and NAME_overlay")
    images = "images and folders of images; all but .npy need Pillow"
    run.add_argument("sources", nargs="+", type=Path, help=images)
    run.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    timed = add("bench", _bench, "latency, its spread, and growth of memory")
    timed.add_argument("--frames", type=int, default=300)
    return parser


def _load(given: argparse.Namespace, frozen_after: int = 0) -> Segmenter:
    """The segmenter of a command, after saying what its export lacks."""
    with warnings.catch_warnings():
        # Told in a line, without a place in the code.
        warnings.simplefilter("ignore", UserWarning)
        segmenter = Segmenter.load(
            given.folder,
            threads=given.threads,
            precision=given.precision,
            deadline_ms=given.deadline_ms,
            engine=given.engine,
            providers=given.providers,
            frozen_after=frozen_after,
        )
    if segmenter.artifact.caveat:
        print(f"warning: {segmenter.artifact.caveat}", file=sys.stderr)
    return segmenter


def _selftest(given: argparse.Namespace) -> int:
    segmenter = _load(given)
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


def _run(given: argparse.Namespace) -> int:
    files = files_of(given.sources, given.out)
    given.out.mkdir(parents=True, exist_ok=True)
    # Files are not a camera: the same one twice is fine.
    segmenter = _load(given)
    answered = [_answer(segmenter, path, given.out / path.stem) for path in files]
    return 0 if all(answered) else 1


def _answer(segmenter: Segmenter, path: Path, stem: Path) -> bool:
    """Write the pictures of an image; False when it has no answer."""
    try:
        image = read_image(path)
        result = segmenter.infer(image)
        why = f"{path}: {segmenter.last_error}"
    except ValueError as error:
        result = segmenter.refuse(Status.ERROR)
        why = str(error)
    print(f"{path} {result.status} {result.latency_ms:.1f} ms")
    write_picture(stem.with_name(f"{stem.name}_mask"), result.mask)
    if result.status is not Status.OK:
        print(why, file=sys.stderr)
        return False
    colored = overlay(image, result.mask, segmenter.artifact.palette)
    write_picture(stem.with_name(f"{stem.name}_overlay"), colored)
    return True


def _bench(given: argparse.Namespace) -> int:
    # Time what a robot checks; the golden frames alternate.
    segmenter = _load(given, frozen_after=5)
    found = bench(segmenter, given.frames)
    print(json.dumps(found, indent=1))
    grows = found["memory_flat"] is False
    if grows:
        print(
            f"memory grew by {found['memory_growth_mib']} MiB; at most {FLAT_MIB} were expected",
            file=sys.stderr,
        )
    return 0 if found["statuses"].keys() <= {Status.OK} and not grows else 1


if __name__ == "__main__":
    sys.exit(main())
