"""`segpipe predict` on videos: frames, size and speed are kept; what breaks off is named and kept so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from exports import structured
from segpipe.errors import ConfigError, DataError, Interrupted
from segpipe.predict import job as job_module
from segpipe.predict.job import (
    CODEC,
    PredictJob,
    film,
    find,
    frames_per_second,
    read_frames,
)
from segpipe.predict.predictor import Pixels, Predictor

SIZE, FPS, FRAMES = (48, 64), 12.5, 10
PALETTE = ((200, 30, 30), (30, 30, 200))


def answer(image: Pixels) -> Pixels:
    """Class 1 where green is above 128."""
    return (image[..., 1] > 128).astype(np.uint8)


def job(out: Path, source: Path | str, **changes: object) -> PredictJob:
    predictor = Predictor(
        lambda image: (answer(image), np.ones(SIZE, np.float32)),
        ("low", "high"),
        PALETTE,
        {"ema_digest": "12ab"},
        {"precision": "fp32"},
    )
    given = {"frames": True, **changes}
    return PredictJob(find(str(source), out)[0], out, predictor, **given)  # type: ignore[arg-type]


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "a drive.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODEC), FPS, SIZE[::-1])
    for image in structured(FRAMES, SIZE):
        writer.write(np.ascontiguousarray(image[..., ::-1]))
    writer.release()
    return path


def run(clip: Path, out: Path, **changes: object) -> list[str]:
    made = job(out, clip, **changes)
    made.run()
    return made.problems


def test_a_video_becomes_a_video_of_the_same_size_and_speed_and_a_mask_per_frame(
    clip: Path, tmp_path: Path
) -> None:
    assert run(clip, tmp_path / "out") == []
    overlay = tmp_path / "out" / "overlays" / "a drive.mp4"
    assert frames_per_second(str(overlay)) == FPS
    pixels = np.zeros(2, int)
    for number, (image, shown) in enumerate(
        zip(read_frames(str(clip)), read_frames(str(overlay)), strict=True)
    ):
        ids = np.asarray(
            Image.open(tmp_path / "out" / "masks" / "a drive.mp4" / f"{number:06}.png")
        )
        assert np.array_equal(ids, answer(image))
        expected = 0.5 * image + 0.5 * np.array(PALETTE)[ids]
        assert np.abs(shown - expected).mean() < 12  # of the codec
        pixels += np.bincount(ids.ravel(), minlength=2)
    entry = json.loads((tmp_path / "out" / "predictions.json").read_text())[
        "predictions"
    ][0]
    assert (entry["frames"], entry["fps"], entry["height"], entry["width"]) == (
        FRAMES,
        FPS,
        *SIZE,
    )
    assert entry["share"] == {
        "low": pixels[0] / pixels.sum(),
        "high": pixels[1] / pixels.sum(),
    }
    done = job(tmp_path / "out", clip)
    done.run()  # the second time everything is there
    assert (done.kept, done.answered, list(done.entries.values())) == (1, 0, [entry])
    with pytest.raises(ConfigError, match="other settings"):
        run(clip, tmp_path / "out", alpha=0.2)


@pytest.mark.parametrize(("lost", "named"), [(2, False), (3, True)])
def test_a_few_frames_may_be_missing_from_the_end(
    clip: Path, monkeypatch: pytest.MonkeyPatch, lost: int, named: bool
) -> None:
    """Two, or one in a hundred where that is more: headers count some that were never there."""

    class Promising:
        def __init__(self, capture: cv2.VideoCapture) -> None:
            self.read = capture.read

        def get(self, _: int) -> float:
            return FRAMES + lost

    opened = job_module._opened

    @contextmanager
    def promising(path: Path) -> Iterator[Promising]:
        with opened(path) as capture:
            yield Promising(capture)

    monkeypatch.setattr(job_module, "_opened", promising)
    if named:
        with pytest.raises(DataError, match="10 of 13 frames"):
            list(read_frames(str(clip)))
    else:
        assert len(list(read_frames(str(clip)))) == FRAMES


def test_a_colon_in_a_name_is_no_protocol(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(clip.rename("12:30.mp4"), Path("out")) == []


def test_a_video_that_breaks_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.avi"
    writer = cv2.VideoWriter(
        str(path), cv2.VideoWriter.fourcc(*"MJPG"), FPS, SIZE[::-1]
    )
    for image in structured(FRAMES, SIZE):
        writer.write(image)
    writer.release()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (problem,) = run(path, tmp_path / "out")
    whole = len(list((tmp_path / "out" / "masks" / "cut.avi").iterdir()))
    assert 0 < whole < FRAMES - 2
    assert f"cut.avi ended after {whole} of {FRAMES} frames. It is trunc" in problem
    assert list((tmp_path / "out" / "overlays").iterdir()) == []
    assert (
        json.loads((tmp_path / "out" / "predictions.json").read_text())["predictions"]
        == []
    )


def test_a_file_cut_short_is_a_problem_beside_the_others(
    clip: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clip.read_bytes()[:2000])
    (tmp_path / "empty.avi").write_bytes(b"")
    problems = run(tmp_path, tmp_path / "out")
    assert len(problems) == 2
    assert all("cannot be opened as a video" in problem for problem in problems)
    assert (tmp_path / "out" / "overlays" / "a drive.mp4").is_file()


def test_an_interrupted_video_leaves_no_part_of_a_film(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = list(read_frames(str(clip)))

    def interrupted(_: Path) -> object:
        yield from frames[:5]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "read_frames", interrupted)
        with pytest.raises(Interrupted, match="0 of 1 sources"):
            run(clip, tmp_path / "out")
    assert list((tmp_path / "out" / "overlays").iterdir()) == []
    assert len(list((tmp_path / "out" / "masks" / "a drive.mp4").iterdir())) == 5
    assert run(clip, tmp_path / "out") == []
    assert len(list((tmp_path / "out" / "masks" / "a drive.mp4").iterdir())) == FRAMES


def test_a_stream_is_read_to_its_end_its_time_or_ctrl_c(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{clip}"  # FFmpeg opens it as it opens rtsp://
    assert run_url(url, tmp_path / "whole") == FRAMES
    assert frames_per_second(str(tmp_path / "whole" / "overlays" / "stream.mp4")) == FPS
    frames = list(read_frames(str(clip)))

    def interrupted(_: str) -> object:
        yield from frames[:5]
        raise KeyboardInterrupt

    monkeypatch.setattr(job_module, "read_frames", interrupted)
    out = tmp_path / "stopped"
    assert run_url(url, out) == 5
    assert len(list(read_frames(str(out / "overlays" / "stream.mp4")))) == 5
    assert run_url(url, out, seconds=1e-9) == 1
    assert len(list((out / "masks" / "stream.mp4").iterdir())) == 1, "not of both"
    (camera,), _ = find("0", tmp_path)
    assert (camera.live, camera.name) == ("0", "camera0")
    (tmp_path / "0").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no images or videos"):  # a folder, then
        find("0", tmp_path / "out")


@pytest.mark.parametrize(("url", "frames"), [("0", 0), ("0", 4), ("rtsp://here", 4)])
def test_a_live_source_that_ends_is_a_problem_and_keeps_its_frames(
    url: str,
    frames: int,
    clip: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = list(read_frames(str(clip)))[:frames]
    opened = cv2.VideoCapture

    class Unplugged:
        def __init__(self, *given: object) -> None:
            self.left = iter(images)

        def isOpened(self) -> bool:  # noqa: N802
            return True

        def get(self, _: int) -> float:
            return -1.0

        def read(self) -> tuple[bool, Pixels | None]:
            image = next(self.left, None)
            return image is not None, image

        def release(self) -> None:
            pass

    monkeypatch.setattr(
        cv2,
        "VideoCapture",
        lambda given, *how: Unplugged() if str(given) == url else opened(given, *how),
    )
    made = job(tmp_path / "out", url)
    made.run()
    ended = f"{url} ended after {frames} frames. Check that it is connected"
    assert [ended in problem for problem in made.problems] == [True]
    assert [entry["frames"] for entry in made.entries.values()] == [4] * bool(frames)
    films = list((tmp_path / "out" / "overlays").iterdir())
    assert len(films) == bool(frames)


def test_a_video_keeps_the_size_of_its_first_frame(tmp_path: Path) -> None:
    path = tmp_path / "grows.mjpeg"
    sizes = [SIZE] * 4 + [(96, 80)] * 4
    pictures = [cv2.imencode(".jpg", np.zeros((*size, 3), np.uint8)) for size in sizes]
    path.write_bytes(b"".join(content.tobytes() for _, content in pictures))
    assert [frame.shape for frame in read_frames(str(path))] == [(*SIZE, 3)] * 8


def run_url(url: str, out: Path, seconds: float = 0.0) -> int:
    """Frames that were predicted."""
    made = job(out, url, seconds=seconds)
    made.run()
    assert made.problems == []
    return made.answered


def test_odd_sizes_grow_by_a_pixel_instead_of_losing_one(tmp_path: Path) -> None:
    image = np.full((33, 47, 3), (200, 30, 30), np.uint8)
    path = tmp_path / "odd.mp4"
    with film(path, 5.0) as add:
        add(image)
        add(image)
    first = next(read_frames(str(path)))
    assert first.shape == (34, 48, 3)
    assert np.abs(first.astype(int) - image[0, 0]).max() < 25


def test_a_film_that_lost_frames_is_refused(tmp_path: Path) -> None:
    def lose() -> None:
        with film(tmp_path / "short.mp4", 5.0) as add:
            add(np.zeros((32, 32, 3), np.uint8))
            add(np.zeros((64, 64, 3), np.uint8))  # OpenCV drops it and says nothing

    with pytest.raises(ConfigError, match="would hold 1 of 2 frames"):
        lose()
    assert list(tmp_path.iterdir()) == []
