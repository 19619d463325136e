"""Finds the files of a split and pairs images with masks, without opening any image.

An image belongs to the mask with the same path except for the suffix. If there are no
such masks, mask stems may end in one of MASK_ENDINGS, and image stems in one of
IMAGE_ENDINGS. The two endings that give most pairs are used for all files; masks with
another ending are other drawings of the same images and are skipped. If images and masks
share a folder, masks have such an ending, or another suffix: a.jpg with a.png.

With I for images (or another of IMAGE_FOLDERS) and M for masks (or another of MASK_FOLDERS), the first existing layout
is used:

    I/SPLIT/ with M/SPLIT/     a folder per split
    SPLIT/I/ with SPLIT/M/     the same, nested the other way round
    SPLIT.csv                  a row per pair
    I/ with M/ and SPLIT.txt   a list per split

Without I and M, images and masks may lie in one folder, SPLIT/ or the root: see above.

`data.images` and `data.masks` name other folders, as FOLDER/SPLIT or FOLDER/SPLIT/*ENDING.
"""

from __future__ import annotations

import csv
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from segpipe.data.catalog import PUBLISHED, PublishedSet, missing, published, typed
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
LOSSLESS = (".png", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
LOSSY = (  # a mask only if there is no lossless one
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".webp",
)
SUFFIXES = (*LOSSLESS, *LOSSY)
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
    ".jpg",
)
# Files next to images that are no images, by suffix, or by name if there is no suffix.
COMPANIONS = (
    ".json", ".xml", ".txt", ".csv", ".md", ".yaml", ".yml", ".html", ".pdf", ".log", ".ini", ".db", ".mat", ".py",
    ".zip", ".tar", ".gz", ".color", ".part",
    "readme", "license", "licence", "copying", "notice", "makefile", "md5sums",
)  # fmt: skip
PACKED = (".zip", ".gz", ".part")  # after an image's suffix, not a companion
MOST_UNREAD = 0.05  # share of a folder's files that may have unknown formats
Files = dict[str, str]  # images by relative path without suffix


class Place(NamedTuple):
    """A folder, and the ending of its images' stems; None: the ending that gives most pairs."""

    folder: Path
    ending: str | None = None


class FolderLayout(NamedTuple):
    """Locations of a split's files: all or the listed files of two folders, or the rows of a table of pairs."""

    images: Place
    masks: Place
    listing: Path | None = None  # SPLIT.txt
    table: Path | None = None  # SPLIT.csv, or lines of two paths separated by a space
    sequences: Sequence[str] = ()  # subfolders to use; empty: all


class Pair(NamedTuple):
    """The files of one sample."""

    name: str
    image: str
    mask: str


class Scan(NamedTuple):
    """Contents of a split's folders and lists."""

    pairs: list[Pair]  # sorted by name
    faults: list[str]  # a message for every file that is not part of a pair
    notes: list[str]  # a message for each folder with a few unknown files
    lists: list[Path]  # files that list a split or its pairs


def scan(data: DataConfig, split: str) -> Scan:
    """Pairs of a split, sorted by name, and messages about other files; "train" is all of data.train_split."""
    joined = data.train_split if split == "train" else split
    scans = [_scan(data, one) for one in joined.split("+")]
    found = Scan(*(list(chain(*parts)) for parts in zip(*scans, strict=True)))
    found.pairs.sort()
    twice = [pair.name for pair, times in Counter(found.pairs).items() if times > 1]
    if twice:
        found.faults.append(
            f"data.train_split = {data.train_split}, but {len(twice)} images are in two of these splits: "
            f"{listed(twice)}. Join splits without common images."
        )
    return found


def scan_undivided(data: DataConfig) -> Scan:
    """As `scan`, for all pairs of a folder data set without splits."""
    return _scan(data, None)


def _scan(data: DataConfig, split: str | None) -> Scan:
    """The scan of one split, or of all pairs for None; an error becomes a fault."""
    found = Scan([], [], [], [])
    try:
        layout = _undivided(data) if split is None else _layout(data, split)
        for place in (layout.images, layout.masks):
            if not place.folder.is_dir():
                raise DataError(missing(place.folder))
        if split and layout.listing and not layout.listing.is_file():
            raise DataError(no_split(data, split))
        source = layout.table or layout.listing
        if source:
            found.lists.append(source)
        pair = _pair_by_table if layout.table else _pair_by_name
        pair(layout, found)
        if not found.pairs and not found.faults:
            where = source or layout.images.folder
            raise DataError(f"{where} is empty: it has no pair of image and mask.")
    except DataError as error:
        found.faults.append(str(error))
    found.pairs.sort()
    return found


def _pair_by_name(layout: FolderLayout, found: Scan) -> None:
    """Add pairs of images and masks with the same stem; only listed ones if there is a list."""
    folders = layout.images.folder, layout.masks.folder
    together = folders[0] == folders[1]
    images = _pictures(folders[0], LOSSLESS if together else (), found)
    # Report the files of a shared folder only once.
    others = Scan([], [], [], []) if together else found
    masks = _pictures(folders[1], LOSSY, others)
    if together and images != masks:  # told apart by their suffixes
        images, masks = _other(images, LOSSLESS), _other(masks, LOSSY)

    of_image, of_mask = _endings(layout, images, masks)
    if together and of_mask:
        images = {
            stem: path for stem, path in images.items() if not stem.endswith(of_mask)
        }
    images, masks = _without(images, of_image), _without(masks, of_mask)
    chosen = images.keys() | masks.keys()
    if layout.sequences:
        chosen = {stem for stem in chosen if stem.split("/")[0] in layout.sequences}
    if layout.listing:
        chosen = _listed(layout.listing, images, of_image, found)

    for stem in sorted(chosen & images.keys() & masks.keys()):
        found.pairs.append(Pair(f"{stem}{of_image}", images[stem], masks[stem]))
    without_mask = sorted((chosen & images.keys()) - masks.keys())
    without_image = sorted((chosen & masks.keys()) - images.keys())
    if without_mask and not found.pairs:
        raise DataError(
            f"{folders[1]} has no masks for the {len(without_mask)} images: {without_mask[0]} needs a mask of the same "
            f"name{f', but there is {without_image[0]}' if without_image else ''}. If names of masks have an ending, "
            "set data.masks='FOLDER/*ENDING.png', or 'FOLDER/SPLIT/*ENDING.png' "
            "with a folder per split. For labels in another format, see `segpipe import --help`."
        )
    for stem in without_mask:
        found.faults.append(
            f"{images[stem]} has no mask {folders[1] / stem}{of_mask}.png. Draw it, or remove the image."
        )
    for stem in without_image:
        found.faults.append(f"{masks[stem]} has no image in {folders[0]}.")


def _pictures(folder: Path, inferior: tuple[str, ...], found: Scan) -> Files:
    """Image files below `folder`. One with a suffix in `inferior` counts only if no other has its stem."""
    pictures: Files = {}
    unread: list[str] = []
    start = len(str(folder)) + 1
    for path in sorted(files_below(folder)):
        stem, suffix = os.path.splitext(path[start:])
        suffix = suffix.lower()
        if os.path.basename(stem).startswith("."):
            continue
        if suffix not in SUFFIXES:
            packed = suffix in PACKED and stem.lower().endswith(SUFFIXES)
            known = (suffix or os.path.basename(stem).lower()) in COMPANIONS
            if packed or not known:
                unread.append(path)
            continue
        if path.encode(errors="replace").decode() != path:
            found.faults.append(
                f"{folder}/{path[start:]!a} has a name that is not UTF-8. Rename it, for example with convmv."
            )
            continue
        other = pictures.setdefault(_composed(stem), path)
        if other.lower().endswith(inferior):
            pictures[_composed(stem)] = path
        elif other != path and suffix not in inferior:
            found.faults.append(
                f"{other} and {path} have the same stem. Remove one of them."
            )

    if unread:
        many = len(unread) > MOST_UNREAD * (len(pictures) + len(unread))
        (found.faults if many else found.notes).append(
            f"{folder} has {len(unread)} files of unknown formats besides {len(pictures)} images: "
            f"{listed([repr(path) for path in unread])}. Convert the images among them, and move the rest away."
        )
    return pictures


def _other(files: Files, suffixes: tuple[str, ...]) -> Files:
    """Files without these suffixes."""
    return {
        stem: path
        for stem, path in files.items()
        if not path.lower().endswith(suffixes)
    }


def _composed(name: str) -> str:
    """A name in Unicode form NFC, with ü as one character; macOS and archives made there use two."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _endings(layout: FolderLayout, images: Files, masks: Files) -> tuple[str, str]:
    """Endings of the stems of images and masks. Raises DataError if two endings fit equally well."""
    of_images, of_masks = [*IMAGE_ENDINGS], [*MASK_ENDINGS]
    if images != masks:
        of_masks = ["", *of_masks]
    if layout.images.ending is not None:
        of_images = [layout.images.ending]
    if layout.masks.ending is not None:
        of_masks = [layout.masks.ending]

    ways = list(product(of_images, of_masks))
    if len(ways) == 1 or (ways[0] == ("", "") and images.keys() & masks.keys()):
        return ways[0]

    counts: Counter[tuple[str, str]] = Counter()
    for of_image in of_images:
        bare = _without(images, of_image)
        for of_mask in of_masks:
            counts[of_image, of_mask] = sum(stem + of_mask in masks for stem in bare)
    (best, most), (_, second) = counts.most_common(2)
    if most and second == most:
        fits = [f"*{ending}" for (_, ending), count in counts.items() if count == most]
        raise DataError(
            f"{layout.masks.folder} has the masks {' and '.join(fits)} for the images. Choose with "
            f"data.masks=FOLDER/SPLIT/{fits[0]}.png, or FOLDER/{fits[0]}.png without a folder per split."
        )
    return best if most else ways[0]


def _without(files: Files, ending: str) -> Files:
    """Files with this ending, by stem without it."""
    return {
        stem.removesuffix(ending): path
        for stem, path in files.items()
        if stem.endswith(ending)
    }


def _listed(listing: Path, images: Files, ending: str, found: Scan) -> set[str]:
    """Stems listed in a split file, whose lines are stems or paths of images, with any suffix."""
    known = {f"{stem}{ending}": stem for stem in images}
    for stem, path in images.items():
        known[stem] = stem
        known[_composed(os.path.splitext(os.path.normpath(path))[0])] = stem

    stems: Counter[str] = Counter()
    for text in _text(listing).splitlines():
        line = _composed(text.strip())
        bare = os.path.splitext(line)[0]
        path = os.path.normpath(listing.parent / bare)
        forms = _composed(text), line, bare, path  # a name may end in a space
        named = [known[form] for form in forms if form in known]
        if named:
            stems[named[0]] += 1
        elif line:
            found.faults.append(
                f"{listing} lists {line:.200}, but no image has this stem."
            )
    _report_repeated(f"{listing} lists", stems, found)
    return set(stems)


def _report_repeated(start: str, names: Counter[str], found: Scan) -> None:
    """Add a fault for each name that a list repeats."""
    for name, times in names.items():
        if times > 1:
            found.faults.append(f"{start} {name} {times} times.")


def _pair_by_table(layout: FolderLayout, found: Scan) -> None:
    """Add the pairs of a CSV file with columns image and mask, or of a list of them; paths relative to the root."""
    root, table = layout.images.folder, layout.table
    assert table is not None
    text = _text(table)
    first = text.partition("\n")[0]
    separators = ",;\t" if table.suffix == ".csv" else " "
    try:
        lines = csv.reader(
            text.splitlines(), delimiter=max(separators, key=first.count)
        )
        rows = [[cell.strip() for cell in line] for line in lines]
    except csv.Error as error:
        raise DataError(
            f"{table} is not a table of images and masks: {error}. Write a row for each pair."
        ) from None

    header = [cell.lower() for cell in rows[0]] if rows else []
    named = {"image", "mask"} <= set(header)
    columns = (header.index("image"), header.index("mask")) if named else (0, 1)
    names: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        if (named and number == 1) or not any(row):
            continue
        cells = [row[place] for place in columns if place < len(row) and row[place]]
        if len(cells) < 2 or not (named or len(row) == 2):
            found.faults.append(
                f"{table}, line {number}: {row}, but one image and one mask were "
                "needed. With more columns, add a header that names image and mask."
            )
            continue
        image, mask = cells
        name = os.path.splitext(os.path.normpath(image))[0]
        names[name] += 1
        pair = Pair(name, str(root / image), str(root / mask))
        absent = [path for path in pair[1:] if not os.path.isfile(path)]
        for path in absent:
            found.faults.append(f"{table}, line {number}: {path} does not exist.")
        if not absent:
            found.pairs.append(pair)

    _report_repeated(f"{table} has", names, found)


def _text(path: Path) -> str:
    """Text of a list or table. Raises DataError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}). Save it as UTF-8 (in PowerShell: -Encoding utf8)."
        ) from None


def _layout(data: DataConfig, split: str) -> FolderLayout:
    """Locations of a split's files. Raises DataError if they are not known."""
    root = Path(data.root)
    if data.images or data.masks:
        divided = SPLIT in data.images + data.masks
        listing = None if divided else root / f"{split}.txt"
        return _named(data, f"/{SPLIT}" * divided, split)._replace(listing=listing)
    if data.name in PUBLISHED:
        return _published(published(data.name), root, split)
    return _found(root, split)


def _published(entry: PublishedSet, root: Path, split: str) -> FolderLayout:
    """Locations of the files of a published set's split."""
    named = entry.folders.get(split, split)
    path = root / (entry.listing or entry.pairs).replace(SPLIT, named)
    fault = ""
    if path != root and not path.is_file():
        fault = f"{path} is missing; it lists the files of split {split}."
    if entry.sequences and split not in entry.sequences:
        fault = f"data.split = {split} is not one of {', '.join(entry.sequences)}."
    if fault:
        raise DataError(f"{fault} Download {entry.title} from {entry.page}.")
    if entry.pairs:
        return FolderLayout(Place(root), Place(root), table=path)
    masks = [_place(root, pattern, named) for pattern in entry.labels]
    return FolderLayout(
        _place(root, entry.images, named),
        next((place for place in masks if place.folder.is_dir()), masks[0]),
        path if entry.listing else None,
        sequences=entry.sequences.get(split, ()),
    )


def _found(root: Path, split: str) -> FolderLayout:
    """Locations of a split's files, found by the names of folders and lists."""
    listing, table = root / f"{split}.txt", root / f"{split}.csv"
    in_table = FolderLayout(Place(root), Place(root), table=table)
    try:
        whole = _synonyms(root)
    except DataError:
        if table.is_file():
            return in_table
        raise
    images, masks = whole.images.folder, whole.masks.folder
    divided = FolderLayout(Place(images / split), Place(masks / split))
    if (images / split).is_dir():
        return divided
    with suppress(DataError):  # two folders of one kind
        outer = _synonyms(root / split)
        if outer.images.folder.is_dir():
            return outer
    if table.is_file() and listing.is_file():
        raise DataError(
            f"{table} and {listing} both list split {split}. Remove one of them."
        )
    if table.is_file():
        return in_table
    undivided = images.is_dir() and masks.is_dir() and not _divided(images, split)
    if listing.is_file() or undivided:
        return whole._replace(listing=listing)
    if not images.is_dir() and _divided(root, split):
        return _synonyms(root / split)
    return divided


def _undivided(data: DataConfig) -> FolderLayout:
    """Locations of all files of a data set without splits. Raises DataError if there are splits."""
    root = Path(data.root)
    for images in ("images/train", "train/images"):
        if (root / images).is_dir() and not (data.images and data.masks):
            raise DataError(
                f"{root / images} exists, so {root} is already divided into splits. To divide one of its folders "
                "again, name it in this and every other command: "
                f"data.images={images} data.masks={images.replace('images', 'masks')}."
            )
    if data.images or data.masks:
        return _named(data, "", "")
    return _synonyms(root)


def no_split(data: DataConfig, split: str) -> str:
    """Message about images and masks without splits."""
    lists = split_lists(Path(data.root))
    fix = (
        f"The lists that exist are {', '.join(lists)}: set the split to one of them, or write {split}.txt."
        if lists
        else f"`segpipe split {typed(data)}` writes train.txt and val.txt."
    )
    return (
        f"{data.root} has images and masks, but nothing defines split {split}: there is no such folder, no "
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
    """Whether a subfolder is named like a split; others, such as a folder per drive, are not splits."""
    names = [path.name.lower() for path in folder.glob("*") if path.is_dir()]
    # "drawn" is no misspelled "train".
    return bool(
        {*SPLITS}.intersection(names) or get_close_matches(split, names, cutoff=0.7)
    )


def _named(data: DataConfig, behind: str, split: str) -> FolderLayout:
    """The folders of the settings; `behind` is appended to the default name of one that is not set."""
    root = Path(data.root)
    images = _place(root, data.images or f"images{behind}", split)
    return FolderLayout(images, _place(root, data.masks or f"masks{behind}", split))


def _place(root: Path, pattern: str, split: str) -> Place:
    """Folder and stem ending from the value of a setting."""
    folder, star, ending = pattern.replace(SPLIT, split).partition("*")
    stem, suffix = os.path.splitext(f"*{ending}")
    if suffix in SUFFIXES:
        ending = stem[1:]
    return Place(root / folder, ending if star else None)


def _synonyms(root: Path) -> FolderLayout:
    """Folders of images and masks below `root`. Raises DataError if one of them has two candidates."""
    places = []
    for kind, names in (("images", IMAGE_FOLDERS), ("masks", MASK_FOLDERS)):
        present = [name for name in names if (root / name).is_dir()]
        if present[:1] != [kind] and len(present) > 1:
            raise DataError(
                f"{root} has {' and '.join(present)}, each of which may hold the {kind}. "
                "Set both data.images and data.masks, as FOLDER/SPLIT, SPLIT/FOLDER or FOLDER."
            )
        places.append(Place(root / (present or [kind])[0]))
    images, masks = places
    apart = any(place.folder.is_dir() for place in places)
    if not apart and any(path.suffix.lower() in SUFFIXES for path in root.glob("*")):
        return FolderLayout(Place(root), Place(root))
    return FolderLayout(images, masks)
