"""Command line of the runtime.

    segpipe-runtime selftest DIR
    segpipe-runtime run DIR IMAGE... --out DIR
    segpipe-runtime bench DIR [--frames N]

In a checkout, `python -m segpipe.runtime` is the same command.

Exit codes: 0 ok, 1 a frame without an answer (such as an unreadable image; the next ones still run), 2 usage, 4 answers
that differ from those of the exporting machine, 7 altered files, 130 Ctrl-C.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

try:
    from PIL import Image
except ImportError:
    Image = None  # type: ignore[assignment]

from .artifact import ArtifactError
from .engines import ENGINES
from .frames import Pixels, Status, look_at
from .segmenter import Segmenter

_WARM_UP = 10  # frames that are not timed
ARRAY = ".npy"  # all other formats need Pillow


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command line; None takes this process's arguments."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.action(given))
    except (ArtifactError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    module = f"python -m {__package__}"
    parser = argparse.ArgumentParser(
        prog=module if __name__ == "__main__" else "segpipe-runtime",
        description="Use and check an exported folder.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, action: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(action=action)
        command.add_argument("folder", help="the exported folder, with SHA256SUMS")
        command.add_argument("--threads", type=int, default=1)
        command.add_argument("--precision", default="fp32", help="of the ONNX file")
        command.add_argument(
            "--engine", default="onnxruntime", help=" or ".join(ENGINES)
        )
        command.add_argument(
            "--providers",
            nargs="+",
            help="of onnxruntime, or one device of OpenVINO; default: CPU",
        )
        command.add_argument("--deadline-ms", type=float)
        return command

    add("selftest", _selftest, "compare checksums, then the golden answers")
    run = add("run", _run, "segment images; writes NAME_mask")
    run.add_argument(
        "sources", nargs="+", type=Path, help="images; all but .npy need Pillow"
    )
    run.add_argument("--out", type=Path, required=True, help="folder for the masks")
    add("bench", _bench, "latency and its spread").add_argument(
        "--frames", type=int, default=300
    )
    return parser


def _load(given: argparse.Namespace, frozen_after: int = 0) -> Segmenter:
    """The segmenter of a command; prints a warning if its export is not verified."""
    with warnings.catch_warnings():
        # Printed below as one line, without a source location.
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
    suffix = ".png" if Image else ARRAY
    masks = [given.out / f"{path.stem}_mask{suffix}" for path in given.sources]
    taken = {mask for mask in masks if mask.exists() or masks.count(mask) > 1}
    if taken:
        raise ValueError(
            f"{min(taken)} exists, or two images would be written to it. Choose another --out, or run them one by one."
        )
    # Files are not a camera: repeated images are fine.
    segmenter = _load(given)
    given.out.mkdir(parents=True, exist_ok=True)
    answered = [
        _answer(segmenter, path, mask)
        for path, mask in zip(given.sources, masks, strict=True)
    ]
    return 0 if all(answered) else 1


def _answer(segmenter: Segmenter, path: Path, mask: Path) -> bool:
    """Write the mask of an image; returns False when it has no answer."""
    try:
        result = segmenter.infer(read_image(path))
        why = f"{path}: {segmenter.last_error}"
    except ValueError as error:
        result = segmenter.refuse(Status.ERROR)
        why = str(error)
    print(f"{path} {result.status} {result.latency_ms:.1f} ms")
    try:
        if mask.suffix == ARRAY:
            np.save(mask, result.mask)
        else:
            Image.fromarray(result.mask).save(mask)
    except OSError as error:
        mask.unlink(missing_ok=True)
        raise OSError(f"{mask} cannot be written ({error}).") from None
    if result.status is not Status.OK:
        print(why, file=sys.stderr)
    return result.status is Status.OK


def _bench(given: argparse.Namespace) -> int:
    if given.frames < 1:
        raise ValueError(f"--frames = {given.frames}, but a number above 0 was needed.")
    # Includes the checks that a robot runs; the golden frames alternate.
    segmenter = _load(given, frozen_after=5)
    # Without images of the exported size the golden frames are noise, which the limits refuse.
    segmenter.artifact.limits.check = look_at  # type: ignore[method-assign, assignment]
    golden = segmenter.artifact.golden.image
    statuses: Counter[str] = Counter()
    times = []
    for number in range(_WARM_UP + given.frames):
        image = golden[number % len(golden)].copy()
        image[-1, -1] = number % 251  # repeated golden frames would look frozen
        result = segmenter.infer(image)
        statuses[result.status] += 1
        times.append(result.latency_ms)
    p50, p90, p99 = np.percentile(times[_WARM_UP:], (50, 90, 99)).round(3).tolist()
    found = {
        "model_id": segmenter.artifact.model_id,
        "engine": segmenter.session.engine.described,
        "size": list(golden.shape[1:3]),
        "statuses": dict(statuses),
        "infer": {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "n": given.frames},
    }
    print(json.dumps(found, indent=1))
    return 0 if statuses.keys() <= {Status.OK} else 1


def read_image(path: Path) -> Pixels:
    """Stored image: uint8 (H, W, 3) RGB from an image file, any array from .npy. Raises ValueError with the path."""
    try:
        if path.suffix.lower() == ARRAY:
            return np.asarray(np.load(path, allow_pickle=False))
        if Image is None:
            raise ValueError(f"without Pillow, only {ARRAY} is supported")
        with Image.open(path) as picture:
            # convert() would clip them to white
            if picture.mode[0] in "IF":
                raise ValueError(
                    f"mode {picture.mode}, but 8 bits per channel were needed"
                )
            return np.asarray(picture.convert("RGB"))
    # Decoders raise SyntaxError, struct.error and types of their own for damaged files.
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error})."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
