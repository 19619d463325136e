"""Which files of a split belong together, and where they lie, without opening any image.

An image belongs to the mask with the same path except for the suffix. If no mask has the
path of an image, the masks may have one of MASK_ENDINGS behind it, and the images one of
IMAGE_ENDINGS: the endings that make most pairs are taken, for all files alike; masks with
another ending are other drawings of the same images and are left alone. In one folder,
masks have such an ending, or another suffix: a.jpg with a.png.

With I for images (or another of IMAGE_FOLDERS) and M for masks (or another of MASK_FOLDERS), the first of these that
exists is taken:

    I/SPLIT/ with M/SPLIT/     a folder per split
    SPLIT/I/ with SPLIT/M/     the same the other way round
    SPLIT.csv                  a row for each pair
    I/ with M/ and SPLIT.txt   a list for each split

Where there is neither I nor M, images and masks may lie in one folder, SPLIT/ or the root: see above.

`data.images` and `data.masks` name other folders, as FOLDER/SPLIT or FOLDER/SPLIT/*ENDING.
"""

from __future__ import annotations

import csv
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from segpipe.data.catalog import PUBLISHED, SetLayout, missing, near, published
from segpipe.errors import DataError, listed
from segpipe.files import files_below

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "JPEGImages", "leftImg8bit")
MASK_FOLDERS = (
    "masks",
    "mask",
    "labels",
    "label",
    "annotations",
    "annotation",
    "annots",
    "gt",
    "gtFine",
    "SegmentationClass",
)
SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".bmp",
    ".tif",
    ".tiff",
    ".webp",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
)
SPLITS = (
    "train",
    "val",
    "test",
    "training",
    "valid",
    "validation",
    "testing",
    "trainval",
    "train_val",
    "dev",
)
SPLIT = "SPLIT"  # stands for the name of the split in data.images and data.masks
IMAGE_ENDINGS = ("", "_leftImg8bit", "_image", "_img", "_rgb", "_sat")
MASK_ENDINGS = (
    "_mask",
    "_masks",
    "_label",
    "_labels",
    "_gt",
    "_seg",
    "_segmentation",
    "_annotation",
    "_L",
    "_labelIds",
    "_gtFine_labelIds",
    "_gtCoarse_labelIds",
    "_gtFine_labelTrainIds",
    "-mask",
    "-label",
)
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif", ".webp")  # no mask, if there is another
# What lies beside pictures and is none; so is a file without a suffix.
COMPANIONS = (
    *(".json", ".xml", ".txt", ".csv", ".md", ".yaml", ".yml", ".html", ".pdf", ".log"),
    *(".ini", ".db", ".mat", ".py", ".zip", ".tar", ".gz", ".color", ".part"),
)
MOST_UNREAD = 0.05  # share of the files of a folder that may be of unknown formats
LOSSLESS = tuple(suffix for suffix in SUFFIXES if suffix not in LOSSY)


class FolderLayout(NamedTuple):
    """Where the files of a split are: in two folders, all of them or those on a list; or in a table of pairs."""

    images: Path
    masks: Path
    image_ending: str | None = (
        None  # what ends the stems of the images; None: found by pairs.py
    )
    mask_ending: str | None = None
    listing: Path | None = None  # SPLIT.txt
    table: Path | None = None  # SPLIT.csv, or pairs of paths with a space between them
    sequences: tuple[str, ...] = ()  # the subfolders that count; none: all


class Pair(NamedTuple):
    """Files of one sample."""

    name: str
    image: str
    mask: str


class Scan(NamedTuple):
    """What the folders and lists of a split hold."""

    pairs: list[Pair]  # sorted by name
    faults: list[str]  # a message for every file that is not part of a pair
    notes: list[str]  # a message for each folder with a few files that are not read


def scan(data: DataConfig, split: str) -> Scan:
    """Pairs of a split, sorted by name, and messages about the other files."""
    found = Scan([], [], [])
    for one in joined(data, split):
        own = _scan(_layout(data, one), one)
        found.pairs.extend(own.pairs)
        found.faults.extend(own.faults)
        found.notes.extend(own.notes)
    found.pairs.sort()
    return found


def joined(data: DataConfig, split: str) -> list[str]:
    """The splits that a split consists of: those of data.train_split for "train"."""
    return (data.train_split if split == "train" else split).split("+")


def scan_undivided(data: DataConfig) -> Scan:
    """As `scan`, of all pairs of a folder data set that has no splits yet."""
    return _scan(undivided(Path(data.root), data.images, data.masks), "all")


def pairings(data: DataConfig, split: str) -> list[Path]:
    """The files that say which images belong to a split, or which mask to which image, if the folders do not."""
    layouts = [_layout(data, one) for one in joined(data, split)]
    found = [one.table or one.listing for one in layouts if not isinstance(one, str)]
    return [path for path in found if path]


def _layout(data: DataConfig, split: str) -> FolderLayout | str:
    """Where the files of a split are, or a message why nothing says so."""
    root = Path(data.root)
    if data.name not in PUBLISHED or data.images or data.masks:
        return locate(root, split, data.images, data.masks)
    layout = _published(published(data.name).layout, root, split)
    if isinstance(layout, str):
        return f"{layout} `segpipe prepare data={data.name}` says where it comes from."
    return layout


def _scan(layout: FolderLayout | str, split: str) -> Scan:
    """The scan of a layout, or the message why there is none."""
    if isinstance(layout, str):
        return Scan([], [layout], [])

    found = Scan([], [], [])
    if layout.table:
        _pair_by_table(layout.images, layout.table, found)
    else:
        _pair_by_name(layout, split, found)

    found.pairs.sort()
    return found


def _pair_by_name(layout: FolderLayout, split: str, found: Scan) -> None:
    """Pairs of images and masks with the same stem, those on a list if there is one."""
    for folder in (layout.images, layout.masks):
        if not folder.is_dir():
            found.faults.append(missing(folder))
            return

    together = layout.masks == layout.images
    if together:
        images, masks = _in_one_folder(layout.images, found)
    else:
        images = _pictures(layout.images, (), found)
        masks = _pictures(layout.masks, LOSSY, found)
    endings = _endings(layout, images, masks)
    if isinstance(endings, str):
        found.faults.append(endings)
        return

    of_image, of_mask = endings
    masks = _without(masks, of_mask)
    if together and of_mask:
        others = images.items()
        images = {name: path for name, path in others if not name.endswith(of_mask)}

    images = _without(images, of_image)
    chosen = images.keys() | masks.keys()
    if layout.sequences:
        chosen = {stem for stem in chosen if stem.split("/")[0] in layout.sequences}
    if layout.listing:
        chosen = _listed(layout.listing, images, of_image, found)

    for stem in sorted(chosen & images.keys() & masks.keys()):
        found.pairs.append(Pair(f"{stem}{of_image}", images[stem], masks[stem]))

    _report_single(layout, images, masks, sorted(chosen), of_mask, found)
    if not found.pairs and not found.faults:
        where = layout.listing or layout.images
        found.faults.append(
            f"{where} is empty: split {split} has no pair of image and mask."
        )


def _in_one_folder(folder: Path, found: Scan) -> tuple[dict[str, str], dict[str, str]]:
    """Images and masks of a folder that holds both: those of another suffix if there are any, or all files twice."""
    images = _pictures(folder, LOSSLESS, found)
    masks = _pictures(folder, LOSSY, Scan([], [], []))
    if images != masks:
        for paths, of_others in ((images, LOSSLESS), (masks, LOSSY)):
            for stem, path in list(paths.items()):
                if path.lower().endswith(of_others):
                    del paths[stem]
    return images, masks


def _report_single(
    layout: FolderLayout,
    images: dict[str, str],
    masks: dict[str, str],
    chosen: list[str],
    of_mask: str,
    found: Scan,
) -> None:
    """Add a fault for each image without a mask, and for each mask without an image."""
    without_mask, without_image = [], []
    for stem in chosen:
        image, mask = images.get(stem), masks.get(stem)
        if image and not mask:
            place = f"{layout.masks / stem}{of_mask}.png"
            without_mask.append(
                f"{image} has no mask {place}. Draw it, or remove the image."
            )
        if mask and not image:
            without_image.append(f"{mask} has no image in {layout.images}.")

    if without_mask and not found.pairs and not without_image:
        without_mask = [
            f"{layout.masks} holds no masks of the {len(without_mask)} images. Labels "
            "of another format: `segpipe import --help`."
        ]

    found.faults.extend([*without_mask, *without_image])


def _pictures(folder: Path, inferior: tuple[str, ...], found: Scan) -> dict[str, str]:
    """Pictures below `folder` by their relative path without suffix.

    A file with a suffix in `inferior` counts only if it is the only one of its stem.
    """
    pictures: dict[str, str] = {}
    unread: list[str] = []
    start = len(str(folder)) + 1
    for path in sorted(files_below(folder)):
        stem, suffix = os.path.splitext(path[start:])
        suffix = suffix.lower()
        if os.path.basename(stem).startswith("."):
            continue
        if suffix not in SUFFIXES:
            if suffix and suffix not in COMPANIONS:
                unread.append(path)
            continue
        if not _is_text(path):
            found.faults.append(
                f"{folder}/{path[start:]!a} has a name that is not UTF-8. Rename "
                "it, with convmv for instance."
            )
            continue
        other = pictures.setdefault(_composed(stem), path)
        if other == path:
            continue
        if other.lower().endswith(inferior):
            pictures[_composed(stem)] = path
        elif suffix not in inferior:
            found.faults.append(
                f"{other} and {path} have the same stem. Remove one of them."
            )

    if unread:
        many = len(unread) > MOST_UNREAD * (len(pictures) + len(unread))
        (found.faults if many else found.notes).append(
            f"{folder} holds {len(unread)} files that are not read, beside {len(pictures)} pictures: "
            f"{listed([repr(path) for path in unread])}. Convert the pictures among them, and move the rest away."
        )
    return pictures


def _is_text(path: str) -> bool:
    """Whether a name can be written to UTF-8 files, such as inputs.json and the report."""
    try:
        return bool(path.encode())
    except UnicodeEncodeError:
        return False


def _composed(name: str) -> str:
    """A name with letters such as ü as one character: macOS and archives made there write two."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _endings(
    layout: FolderLayout, images: Iterable[str], masks: Iterable[str]
) -> tuple[str, str] | str:
    """What ends the stems of images and masks, or a message if two endings fit equally well."""
    of_images, of_masks = [*IMAGE_ENDINGS], ["", *MASK_ENDINGS]
    if layout.image_ending is not None:
        of_images = [layout.image_ending]
    if images == masks:
        of_masks = [*MASK_ENDINGS]
    if layout.mask_ending is not None:
        of_masks = [layout.mask_ending]

    ways = list(product(of_images, of_masks))
    stems = set(masks)
    if len(ways) == 1 or (ways[0] == ("", "") and not stems.isdisjoint(images)):
        return ways[0]

    counts: Counter[tuple[str, str]] = Counter()
    for of_image in of_images:
        bare = _without(dict.fromkeys(images, ""), of_image)
        for of_mask in of_masks:
            expected = (f"{stem}{of_mask}" for stem in bare)
            counts[of_image, of_mask] = sum(stem in stems for stem in expected)

    (best, most), (_, second) = counts.most_common(2)
    if not most:
        return ways[0]
    if second == most:
        fits = [f"*{ending}" for (_, ending), count in counts.items() if count == most]
        return (
            f"{layout.masks} has the masks {' and '.join(fits)} for its images. Choose with "
            f"data.masks=FOLDER/SPLIT/{fits[0]}."
        )

    return best


def _without(paths: dict[str, str], ending: str) -> dict[str, str]:
    """Files by what is before the ending; those that do not have it are left out."""
    return {
        stem.removesuffix(ending): path
        for stem, path in paths.items()
        if stem.endswith(ending)
    }


def _listed(
    listing: Path, images: dict[str, str], ending: str, found: Scan
) -> set[str]:
    """Stems in a split file, whose lines are stems or paths of images, with any suffix."""
    known = {f"{stem}{ending}": stem for stem in images}
    known |= {stem: stem for stem in images}
    for stem, path in images.items():
        known[_composed(os.path.splitext(os.path.normpath(path))[0])] = stem

    stems: Counter[str] = Counter()
    for text in _text(listing).splitlines():
        line = _composed(text.strip())
        bare = os.path.splitext(line)[0]
        path = os.path.normpath(listing.parent / bare)
        known_stem = known.get(line) or known.get(bare) or known.get(path)
        if known_stem:
            stems[known_stem] += 1
        elif line:
            found.faults.append(
                f"{listing} lists {line:.200}, but images has no such stem."
            )

    _report_repeated(listing, "lists", stems, found)
    return set(stems)


def _report_repeated(
    listing: Path, verb: str, names: Counter[str], found: Scan
) -> None:
    """Add a fault for each name that a list has more than once."""
    for name, times in names.items():
        if times > 1:
            found.faults.append(f"{listing} {verb} {name} {times} times.")


def _pair_by_table(root: Path, table: Path, found: Scan) -> None:
    """Pairs of a CSV file with the columns image and mask, whose paths are relative to `root`."""
    text = _text(table)
    first = text.partition("\n")[0]
    separators = ",;\t" if table.suffix == ".csv" else " "
    separator = max(separators, key=first.count)
    try:
        rows = list(csv.reader(text.splitlines(), delimiter=separator))
    except csv.Error as error:
        raise DataError(
            f"{table} is no table of image and mask: {error}. Write a row for each pair."
        ) from None

    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    named = {"image", "mask"} <= set(header)
    columns = (header.index("image"), header.index("mask")) if named else (0, 1)
    names: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        if (named and number == 1) or not "".join(row).strip():
            continue
        if len(row) <= max(columns) or (not named and len(row) != 2):
            found.faults.append(
                f"{table}, line {number}: {len(row)} columns, but image and mask were "
                "needed. Add a header."
            )
            continue
        image, mask = (row[column].strip() for column in columns)
        name = Path(image).with_suffix("").as_posix()
        names[name] += 1
        pair = Pair(name, str(root / image), str(root / mask))
        absent = [path for path in pair[1:] if not os.path.isfile(path)]
        for path in absent:
            found.faults.append(f"{table}, line {number}: {path} does not exist.")
        if not absent:
            found.pairs.append(pair)

    _report_repeated(table, "has", names, found)
    if not names and not found.faults:
        found.faults.append(f"{table} is empty: it has no pair of image and mask.")


def _text(path: Path) -> str:
    """Text of a list or table. Raises DataError for one that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}). Save it as UTF-8 (in PowerShell: "
            "-Encoding utf8)."
        ) from None


def _published(layout: SetLayout, root: Path, split: str) -> FolderLayout | str:
    """FolderLayout of a split, or a message why there is none."""
    named = layout.folders.get(split, split)
    path = root / (layout.listing or layout.table).replace(SPLIT, named)
    if (layout.listing or layout.table) and not path.is_file():
        return f"{path} does not exist, which lists the files of split {split}."
    if layout.table:
        return FolderLayout(root, root, table=path)
    if layout.sequences and split not in layout.sequences:
        return f"data.split = {split} is not one of {', '.join(layout.sequences)}."
    images, image_ending = _place(root, layout.images, named)
    places = [_place(root, masks, named) for masks in layout.masks]
    masks, mask_ending = next(
        (place for place in places if place[0].is_dir()), places[0]
    )
    listing = path if layout.listing else None
    sequences = tuple(layout.sequences.get(split, ()))
    return FolderLayout(
        images, masks, image_ending, mask_ending, listing, sequences=sequences
    )


def locate(
    root: Path, split: str, images: str = "", masks: str = ""
) -> FolderLayout | str:
    """FolderLayout of a split, or a message why there is none; `images` and `masks` are those of the settings."""
    listing, table = root / f"{split}.txt", root / f"{split}.csv"
    if images or masks:
        behind = f"/{SPLIT}" if SPLIT in images + masks else ""
        image_place = _place(root, images or f"images{behind}", split)
        mask_place = _place(root, masks or f"masks{behind}", split)
        if not behind and not listing.is_file():
            return no_split(root, split)
        return FolderLayout(
            image_place[0],
            mask_place[0],
            image_place[1],
            mask_place[1],
            None if behind else listing,
        )
    inner, outer = _synonyms(root), _synonyms(root / split)
    if isinstance(inner, str):
        return FolderLayout(root, root, table=table) if table.is_file() else inner
    if (inner.images / split).is_dir():
        return FolderLayout(inner.images / split, inner.masks / split)
    if (root / split).is_dir() and not isinstance(outer, str) and outer.images.is_dir():
        return outer
    if table.is_file() and listing.is_file():
        return f"{table} and {listing} both list split {split}. Remove one of them."
    if table.is_file():
        return FolderLayout(root, root, table=table)
    if listing.is_file():
        return inner._replace(listing=listing)
    if (
        inner.images.is_dir()
        and inner.masks.is_dir()
        and not _divided(inner.images, split)
    ):
        return no_split(root, split)
    return FolderLayout(inner.images / split, inner.masks / split)


def undivided(root: Path, images: str = "", masks: str = "") -> FolderLayout | str:
    """Layout of all files of a data set whose folders no split divides, or a message why there is none."""
    for divided in (root / "images" / "train", root / "train" / "images"):
        if divided.is_dir() and not (images and masks):
            return (
                f"{divided} exists, so {root} is divided into splits already. To divide one of its folders again, name "
                "it here and in every other command: data.images=images/train data.masks=masks/train."
            )
    if not (images or masks):
        return _synonyms(root)
    (images_at, image_ending), (masks_at, mask_ending) = (
        _place(root, value or kind, "")
        for value, kind in ((images, "images"), (masks, "masks"))
    )
    return FolderLayout(images_at, masks_at, image_ending, mask_ending)


def no_split(root: Path, split: str) -> str:
    """Message for images and masks that no list or folder divides."""
    lists = split_lists(root)
    fix = (
        f"The lists that exist are {', '.join(lists)}: set the split to one of them, or write {split}.txt."
        if lists
        else f"`segpipe split data.root={root}` writes train.txt and val.txt."
    )
    return (
        f"{root} has images and masks, but nothing says which belong to split {split}: there is no folder, no "
        f"{split}.txt and no {split}.csv. {fix}"
    )


def split_lists(root: Path) -> list[str]:
    """Names of the files below `root` that may list a split."""
    return sorted(
        path.name
        for path in root.glob("*")
        if path.stem in SPLITS and path.suffix in (".txt", ".csv")
    )


def _divided(folder: Path, split: str) -> bool:
    """Whether a folder is named like a split; others, a folder per drive say, divide nothing."""
    names = [path.name.lower() for path in folder.iterdir() if path.is_dir()]
    return any(name in SPLITS for name in names) or bool(near(split, names))


def _place(root: Path, pattern: str, split: str) -> tuple[Path, str | None]:
    """Folder and ending of stems that a setting names."""
    folder, star, ending = pattern.replace(SPLIT, split).partition("*")
    for suffix in SUFFIXES:
        ending = ending.removesuffix(suffix)
    return root / folder, ending if star else None


def _synonyms(root: Path) -> FolderLayout | str:
    """Folders of images and masks below `root`, or a message if one of them has two candidates."""
    found = []
    for kind, names in (("images", IMAGE_FOLDERS), ("masks", MASK_FOLDERS)):
        present = [name for name in names if (root / name).is_dir()]
        if present[:1] != [kind] and len(present) > 1:
            return (
                f"{root} has {' and '.join(present)}, and each may hold the {kind}. Set data.{kind}={present[0]} or "
                f"another, with /{SPLIT} behind it if there is a folder per split."
            )
        found.append(root / (present or [kind])[0])
    if not found[0].is_dir() and not found[1].is_dir() and _has_pictures(root):
        return FolderLayout(root, root)
    return FolderLayout(found[0], found[1])


def _has_pictures(folder: Path) -> bool:
    paths = folder.iterdir() if folder.is_dir() else ()
    return any(path.suffix.lower() in SUFFIXES for path in paths)
