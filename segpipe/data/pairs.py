"""Which files of a split belong together, without opening any image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from segpipe.data.folders import missing, near
from segpipe.errors import DataError

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


class Pair(NamedTuple):
    """Files of one sample."""

    name: str
    image: str
    mask: str


def scan(data: DataConfig, split: str) -> tuple[list[Pair], list[str]]:
    """Pairs of a split, sorted by name, and a message for every file that is not part of a pair."""
    root = Path(data.root)
    listing = root / f"{split}.txt"
    listed = data.name != "camvid" and listing.is_file() and not (root / "images" / split).is_dir()
    if data.name == "camvid":
        image_dir, mask_dir = root / split, root / f"{split}annot"
    else:
        image_dir, mask_dir = (root / kind / ("" if listed else split) for kind in ("images", "masks"))
    for folder in (image_dir, mask_dir):
        if not folder.is_dir():
            return [], [missing(folder)]
    images, faults = _stems(image_dir, IMAGE_SUFFIXES)
    masks, mask_faults = _stems(mask_dir, (".png",))
    faults += mask_faults
    if listed:
        wanted, list_faults = _listed(listing, images)
        faults += list_faults
        images, masks = ({stem: paths[stem] for stem in wanted if stem in paths} for paths in (images, masks))
    faults += [f"{images[stem]} has no mask {mask_dir / stem}.png." for stem in sorted(images.keys() - masks.keys())]
    faults += [f"{masks[stem]} has no image in {image_dir}." for stem in sorted(masks.keys() - images.keys())]
    pairs = [Pair(stem, images[stem], masks[stem]) for stem in sorted(images.keys() & masks.keys())]
    if not pairs:
        faults.append(f"{listing if listed else image_dir} is empty: split {split} has no pair of image and mask.")
    return pairs, faults


def _stems(folder: Path, suffixes: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Files below `folder` by their relative path without suffix, and a message for every two that share it."""
    found: dict[str, str] = {}
    faults: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in suffixes and not path.name.startswith("."):
            stem = path.relative_to(folder).with_suffix("").as_posix()
            if stem in found:
                faults.append(f"{found[stem]} and {path} have the same stem. Remove one of them.")
            found[stem] = str(path)
    return found, faults


def _listed(listing: Path, images: dict[str, str]) -> tuple[list[str], list[str]]:
    """Stems in a split file, and a message for every wrong line."""
    stems = [line.strip() for line in listing.read_text().splitlines() if line.strip()]
    faults = [f"{listing} lists {stem} {times} times." for stem, times in Counter(stems).items() if times > 1]
    for stem in stems:
        if stem not in images:
            other = near(stem, images)
            hint = f" Did you mean {other}?" if other else ""
            faults.append(f"{listing} lists {stem}, but images has no such stem.{hint}")
    return stems, faults


def check_sizes(pair: Pair, image: Sequence[int], mask: Sequence[int]) -> None:
    """Raise DataError unless image and mask have the same (height, width)."""
    if tuple(image) != tuple(mask):
        raise DataError(
            f"{pair.image} is {image[0]}x{image[1]}, but its mask {pair.mask} is {mask[0]}x{mask[1]} (height x width). "
            "Take the mask of this image; do not resize one of them blindly."
        )
