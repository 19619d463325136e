"""A data set and transforms of the user: every sample is checked, and what it was made from is hashed."""

import hashlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segpipe import plugins
from segpipe.checks.elsewhere import elsewhere
from segpipe.data.augment import Augmenter
from segpipe.data.data_set import PerProcess
from segpipe.data.samples import class_pixels, image_sizes, open_samples, open_splits
from segpipe.datasets.problems import problems
from segpipe.errors import ConfigError, DataError
from segpipe.ledger.inputs import hashes_of, inputs_of, sizes_of
from segpipe.run.launch import checks
from segpipe.settings.config import Config
from segpipe.settings.groups import AugmentConfig, DataConfig

Write = Callable[[str, str], None]
DATA = """
    import numpy as np

    class Data:
        classes, palette = ("a", "b"), ((0, 0, 0), (9, 9, 9))

        def __init__(self, root, split, num=20, fault=""):
            self.root, self.split, self.num, self.fault = root, split, num, fault

        def __len__(self):
            return self.num

        def name(self, index):
            return f"{self.split}{min(index, 0 if self.fault == 'names' else index)}"

        def read(self, index):
            image = np.full((8 + index, 6, 3), index, np.uint8)
            target = np.full((8 + index, 6), index % 2, np.uint8)
            target[0] = 255
            if self.fault == "float":
                image = image / 255
            if self.fault == "grey":
                image = image[..., 0]
            if self.fault == "size":
                target = target[1:]
            if self.fault == "id" and index == 10:
                target[3, 3] = 2
            if self.fault == "raises":
                raise FileNotFoundError("gone.png")
            return image, target

    class Listed(Data):
        def files(self, index):
            return [f"{self.root}/{self.name(index)}.bin"]

        def size(self, index):
            return 100, 200

    class OneFile(Data):
        file = None  # holds all images; the first read opens it, as the advice says

        def __getstate__(self):
            return self.__dict__ | {"file": None}

        def read(self, index):
            if self.file is None:
                self.file = open(f"{self.root}/all.bin", "rb", buffering=0)
            self.file.seek(index * 192)
            parts = [self.file.read(16) for _ in range(12)]
            image = np.frombuffer(b"".join(parts), np.uint8).reshape(8, 8, 3)
            return image, np.full((8, 8), index % 2, np.uint8)

    class Unlisted(Data):
        def files(self, index):
            return None

    class Swapped(Data):
        def __init__(self, root, split):
            super().__init__(root, split)
            self.classes = ("a", "b") if split == "train" else ("b", "a")

    class Colorless(Data):
        palette = ()

    class Twice(Data):
        classes = ("a", "a")

    class ById(Data):
        classes = {0: "a", 1: "b"}

    class Unordered(Data):
        classes = {"a"}

    class NoPalette(Data):
        palette = None

    class Shares(Data):
        palette = np.eye(2, 3) / 2

    class Refilled(Data):
        image, target = np.zeros((8, 6, 3), np.uint8), np.zeros((8, 6), np.uint8)

        def read(self, index):
            self.image[:], self.target[:] = index, index % 2
            return self.image, self.target

    class Odd:
        def __init__(self, root, split):
            pass

        def __len__(self):
            return 1
"""
TRANSFORMS = """
    import albumentations as A
    import numpy as np

    class Row:
        def __call__(self, image, target, rng):
            image = image.copy()
            image[int(rng.integers(len(image)))] = 0
            return image, target

    class Smaller:
        def __call__(self, image, target, rng):
            return image[:8], target[:8]

    class Dark(A.ImageOnlyTransform):
        def __init__(self):
            super().__init__(p=1.0)

        def apply(self, img, **_):
            return img // 2

    class Needs:
        def __init__(self, strength):
            pass

    def nothing():
        return 3
"""


@pytest.fixture(autouse=True)
def code(project: Write) -> None:
    project("data.py", DATA)
    project("transforms.py", TRANSFORMS)


def config(name: str = "data:Data", **args: Any) -> DataConfig:
    return DataConfig(name=name, root="here", args=args)


def test_samples_come_from_the_users_class() -> None:
    samples = open_samples(config(num=3), "train", 0)
    assert (len(samples), samples.name(2), samples.classes.names) == (
        3,
        "train2",
        ("a", "b"),
    )
    assert samples.classes.palette[1] == (9, 9, 9)
    image, target = pickle.loads(pickle.dumps(samples)).read(2)
    assert (image.shape, target.shape, int(image.max())) == ((10, 6, 3), (10, 6), 2)
    assert class_pixels(samples).tolist() == [6 * (7 + 9), 6 * 8]
    # All of them: the user's samples may be sorted, and the first 64 of one drive.
    many = open_samples(config(num=70), "train", 0)
    assert class_pixels(many).sum() == 6 * sum(range(7, 77))
    assert image_sizes(samples) == {(8, 6): 1, (9, 6): 1, (10, 6): 1}
    assert image_sizes(open_samples(config("data:Listed", num=3), "train", 0)) == {
        (100, 200): 3
    }
    assert not list(problems(config(), ["train", "val"]))


def test_classes_without_colors_get_some() -> None:
    samples = open_samples(config("data:Colorless"), "train", 0)
    assert samples.classes.names == ("a", "b")
    assert len(set(samples.classes.palette)) == 2


def test_a_sample_stays_when_the_user_fills_its_memory_again() -> None:
    samples = open_samples(config("data:Refilled"), "train", 0)
    image, target = samples.read(0)
    assert samples.read(1)[0].max() == 1
    assert (image.max(), target.max()) == (0, 0)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "float",
            "train0 has the image float64 (8, 6, 3), but a numpy array uint8 (H, W, 3) in RGB order",
        ),
        ("grey", "train0 has the image uint8 (8, 6)"),
        ("size", "an image (8, 6, 3) and a target (7, 6), but (H, W, 3) and (H, W)"),
        ("id", "train10 has class id 2, but the classes end at 1; 255 means ignored"),
        ("raises", "read(0) failed: "),
    ],
)
def test_samples_that_do_not_fit_are_named(fault: str, says: str) -> None:
    found = list(problems(config(fault=fault), ["train"]))
    assert says in found[0]
    assert found[0].startswith("data.name = data:Data, split train: ")
    if fault == "raises":
        assert "data.py, line" in found[0]
        assert "FileNotFoundError: gone.png" in found[0]


def test_some_samples_are_checked_before_a_training_and_all_on_demand() -> None:
    data = config(fault="id", num=50)
    data.verify = "headers"
    assert not list(problems(data, ["train"]))  # reads 0, 3, 6, 9, 12 ...
    data.verify = "full"
    assert len(list(problems(data, ["train"]))) == 1


def test_two_samples_of_one_name_are_refused() -> None:
    found = list(problems(config(fault="names", num=2), ["train"]))
    assert found == ["samples 0 and 1 are both named train0. Give each its own name."]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            config(nmu=3),
            "data.args.nmu is not an argument of data:Data, which takes num, fault. Did you mean num",
        ),
        (config(num=0), "split train has no sample"),
        (config("data:Odd"), "data:Odd: the object has no name, read, classes"),
        (config("data:Twice"), "data.name = data:Twice: names has a twice"),
        (config("data:ById"), "names has {0: 'a', 1: 'b'}, but a list"),
        (config("data:Unordered"), "names has {'a'}, but a list"),
        (config("data:NoPalette"), "palette = None, but 2 colors"),
        (
            config("data:Shares"),
            r"palette = \[0\.5, 0\.0, 0\.0\], but integers .* from 0 to 255",
        ),
        (config("data:Date"), "data has no Date. Did you mean Data"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(given: DataConfig, says: str) -> None:
    with pytest.raises((ConfigError, DataError), match=says):
        open_samples(given, "train", 0)


def test_splits_of_other_classes_are_refused_before_a_training() -> None:
    given = Config(data=config("data:Swapped"))
    _, scorable, *_ = checks(given, open_splits(given))
    with pytest.raises(DataError, match="val of Swapped has the classes b, a, but the"):
        scorable()


def test_inputs_are_hashed_by_file_or_by_content(project: Write) -> None:
    found = hashes_of(
        inputs_of([open_samples(config(num=2), split, 0) for split in ["train", "val"]])
    )
    assert list(found) == ["train/train0", "train/train1", "val/val0", "val/val1"]
    assert found["train/train0"] == found["val/val0"] != found["train/train1"]
    unlisted = open_samples(config("data:Unlisted", num=2), "train", 0)
    assert list(unlisted.inputs()) == ["train/train0", "train/train1"]
    Path("here").mkdir()
    for name in ("train0", "train1"):
        Path(f"here/{name}.bin").write_text(name)
    assert hashes_of(
        inputs_of([open_samples(config("data:Listed", num=2), "train", 0)])
    ) == {
        f"{name}.bin": hashlib.sha256(name.encode()).hexdigest()
        for name in ("train0", "train1")
    }
    later = inputs_of([open_samples(config("data:Listed", num=3), "train", 0)])
    assert sizes_of(later)["train2.bin"] is None  # with data.hash=false
    with pytest.raises(DataError, match=r"here/train2.bin cannot be read.*hash=false"):
        hashes_of(later)


def augmented(name: str, key: int = 1) -> np.ndarray[Any, Any]:
    quiet = dict.fromkeys(("flip", "brightness", "contrast", "saturation", "hue"), 0.0)
    settings = AugmentConfig(
        crop_size=[32, 32], scale=[1.0, 1.0], extra=[name], **quiet
    )  # type: ignore[arg-type]
    augmenter = pickle.loads(pickle.dumps(Augmenter(settings)))
    image, _ = augmenter(
        np.full((32, 32, 3), 200, np.uint8), np.zeros((32, 32), np.uint8), key
    )
    return np.asarray(image)


def test_transforms_of_the_user_follow_the_key() -> None:
    assert np.array_equal(
        augmented("transforms:Dark"), np.full((32, 32, 3), 100, np.uint8)
    )
    rows = {
        tuple(np.flatnonzero((augmented("transforms:Row", key) == 0).all((1, 2))))
        for key in range(8)
    }
    assert len(rows) > 3
    assert np.array_equal(
        augmented("transforms:Row", 5), augmented("transforms:Row", 5)
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Smaller",
            r"transforms:Smaller made uint8 \(8, 32, 3\) of the image uint8 \(32, 32, 3\)",
        ),
        (
            "Needs",
            r"transforms:Needs cannot be called as Needs\(\): .*'strength'. Name a function of your own",
        ),
        (
            "nothing",
            "augment.extra = transforms:nothing made 3, but an albumentations transform",
        ),
        ("Roww", "transforms has no Roww. Did you mean Row"),
    ],
)
def test_a_transform_that_does_not_fit_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        augmented(f"transforms:{name}")


@pytest.mark.parametrize("name", ["ToFloat", "Normalize", "RandomScale"])
def test_a_transform_of_albumentations_keeps_dtype_and_shape(name: str) -> None:
    """ToFloat trained on pictures of 0 and 1: batches are uint8."""
    plugins.trust(["albumentations"])
    with pytest.raises(
        ConfigError, match=rf"albumentations:{name} made .* must not change"
    ):
        [augmented(f"albumentations:{name}", key) for key in range(20)]


def test_a_mask_of_another_shape_is_refused(project: Write) -> None:
    project(
        "rows.py",
        """
        import albumentations

        class Row(albumentations.DualTransform):
            def __init__(self):
                super().__init__(p=1.0)

            def apply(self, image, **params):
                return image

            def apply_to_mask(self, mask, **params):
                return mask[0]
        """,
    )
    plugins.trust(["rows:Row"])
    with pytest.raises(ConfigError, match=r"rows:Row made uint8 \(32,\) of the mask"):
        augmented("rows:Row")


def read_all(samples: Any, times: int) -> list[bool]:
    """Whether each read in this process gives the sample that was asked for."""
    with suppress(DataError):  # a part of another image is too short
        return [
            bool((samples.read(index)[0] == index).all())
            for _ in range(times)
            for index in range(len(samples))
        ]
    return [False]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_loader_processes_do_not_share_the_position_in_an_open_file(
    tmp_path: Path,
    project: Write,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    """The checks before a training read in the process that is forked. Control: without a copy, images are mixed up."""
    project("mine.py", DATA)
    pixels = b"".join(bytes([index]) * 192 for index in range(20))
    (tmp_path / "all.bin").write_bytes(pixels)
    data = DataConfig(name="mine:OneFile", root=str(tmp_path))
    samples = open_samples(data, "train", 0)
    assert all(read_all(samples, 1))
    if shared:
        monkeypatch.setattr(PerProcess, "value", property(lambda own: own._value))
    context = get_context("fork")
    answers = context.SimpleQueue()
    readers = [
        context.Process(target=lambda: answers.put(read_all(samples, 300)))
        for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    found = [answers.get() for _ in readers]
    for reader in readers:
        reader.join()
    samples.source.file.close()  # type: ignore[attr-defined]
    assert all(map(all, found)) != shared


def test_forked_processes_do_not_copy_arrays() -> None:
    """A data set that lies in memory is there once, not once for each loader process."""
    own = PerProcess({"images": np.zeros(1 << 20, np.uint8)})

    def address() -> int:
        return int(own.value["images"].ctypes.data)

    assert elsewhere("fork", address) == address()


def test_a_forked_process_that_cannot_copy_an_object_says_so(project: Write) -> None:
    """Such as evaluate: only a training tries it first."""
    closed = DATA.replace("self.root,", "self.seen, self.root,", 1)
    closed = closed.replace("= root, split,", "= lambda: 0, root, split,", 1)
    project("mine.py", closed)
    samples = open_samples(DataConfig(name="mine:Data", root="."), "train", 0)
    with pytest.raises(DataError, match=r"read\(0\) failed: .*pickle local object"):
        elsewhere("fork", samples.read, 0)
