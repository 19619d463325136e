"""The artefact from the command line.

    python -m segpipe.runtime selftest DIR
    python -m segpipe.runtime run DIR IMAGE... --out DIR
    python -m segpipe.runtime bench DIR [--frames N]

Exit codes: 0 done, 1 a frame got no answer (a file that cannot be read is one, and the next goes on) or memory grew, 2
usage, 4 other answers than where it was exported, 7 altered files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from segpipe.runtime.artifact import ArtifactError
from segpipe.runtime.bench import FLAT_MIB, bench
from segpipe.runtime.images import overlay, read_image, require_readable, write_picture
from segpipe.runtime.segmenter import Segmenter
from segpipe.runtime.status import Status


def main(arguments: Sequence[str]) -> int:
    """Exit code."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "run":
            _check_images([Path(image) for image in given.images])
            Path(given.out).mkdir(parents=True, exist_ok=True)
        # Files are not a camera: the same one twice is no fault.
        segmenter = Segmenter.load(
            given.folder,
            threads=given.threads,
            precision=given.precision,
            deadline_ms=given.deadline_ms,
            frozen_after=0,
        )
        return {"selftest": _selftest, "run": _run, "bench": _bench}[given.command](segmenter, given)
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _selftest(segmenter: Segmenter, given: argparse.Namespace) -> int:
    agreement, confidence_levels = segmenter.session.self_test()
    golden = segmenter.artifact.golden
    print(f"{segmenter.artifact.model_id}: {segmenter.artifact.num_files} files as exported")
    print(
        f"{len(golden.image)} golden frames: at least {100 * agreement:.4g} % of the pixels equal, confidence within "
        f"{confidence_levels} levels"
    )
    return 0


def _check_images(paths: Sequence[Path]) -> None:
    """Raises ValueError for a file that nobody could read, and for two whose masks would have one name."""
    stems: dict[str, Path] = {}
    for path in paths:
        require_readable(path)
        other = stems.setdefault(path.stem, path)
        if other != path:
            raise ValueError(f"{other} and {path} would both be answered in {path.stem}_mask. Run them one by one.")


def _run(segmenter: Segmenter, given: argparse.Namespace) -> int:
    answered = True
    for path in map(Path, given.images):
        image = None
        try:
            image = read_image(path)
            result = segmenter.infer(image)
        except ValueError as error:  # of the file; `infer` has none
            print(error, file=sys.stderr)
            result = segmenter.refuse(Status.ERROR)
        print(f"{path} {result.status} {result.latency_ms:.1f} ms")
        if image is not None and result.status is Status.BAD_SHAPE:
            needed = segmenter.artifact.shapes.words()
            print(
                f"{path}: {'x'.join(map(str, image.shape[:2]))}, but {needed} was needed (height x width)",
                file=sys.stderr,
            )
        answered = answered and result.status is Status.OK
        write_picture(Path(given.out) / f"{path.stem}_mask", result.mask)
        if image is not None and result.status is Status.OK:
            picture = overlay(image, result.mask, segmenter.artifact.palette)
            write_picture(Path(given.out) / f"{path.stem}_overlay", picture)
    return 0 if answered else 1


def _bench(segmenter: Segmenter, given: argparse.Namespace) -> int:
    segmenter.frozen_after = 5  # its frames take turns, and what a robot checks is to be timed too
    found = bench(segmenter, given.frames, given.threads)
    print(json.dumps(found, indent=1))
    answered = found["statuses"].keys() <= {Status.OK}
    if found["memory_flat"] is False:
        print(f"memory grew by {found['memory_growth_mib']} MiB, at most {FLAT_MIB} were expected", file=sys.stderr)
    return 0 if answered and found["memory_flat"] is not False else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m segpipe.runtime", description="Use and check an exported folder.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("selftest", "compare checksums, then golden answers on this machine"),
        ("run", "answer images; writes NAME_mask and NAME_overlay"),
        ("bench", "latency, its spread, and growth of memory"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("folder", help="the exported folder, with SHA256SUMS")
        if name == "run":
            command.add_argument("images", nargs="+", help=".npy or .ppm; others with Pillow")
            command.add_argument("--out", required=True, help="folder of the pictures")
        if name == "bench":
            command.add_argument("--frames", type=_positive, default=300)
        command.add_argument("--threads", type=_positive, default=1)
        command.add_argument("--precision", default="fp32")
        command.add_argument("--deadline-ms", type=float, default=None)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, but a number above 0 was needed")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
