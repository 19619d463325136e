"""All commands and their keys, for --help and the parser. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from segpipe.settings.config import SETTINGS
from segpipe.settings.setting import Setting

Given = dict[str, Any]  # values of a command's keys, defaults included

RUN = Setting("run", "runs/NAME", "folder of the run", required=True)
WHICH = Setting("which", "last", "checkpoint to use", choices=("last", "best"))
IMPORTS = ("voc", "coco", "labelme", "cvat", "roboflow")
TRUST = Setting(
    "trust",
    [],
    "packages that code named by the run may be imported from, see docs/plugins.md",
)
TTA = Setting(
    "tta",
    [],
    "test-time augmentation, averaged: [flip,0.75,1.25] for mirrored and scaled images",
)
LINES = Setting("lines", 20, "problems to print; 0: all")
JSON = Setting("json", False, "print one line of JSON")
DATA = ("data.root", "data.images", "data.masks", "data.split")
ALL = tuple(dict.fromkeys(key.partition(".")[0] for key in SETTINGS))
EXPORT = tuple(
    key for key in SETTINGS if key.startswith("export.") and key != "export.enabled"
)


@dataclass(frozen=True)
class Command:
    """A command that takes `overrides` of settings, as `segpipe train` does, its own `keys`, or both."""

    summary: str
    details: str
    keys: tuple[Setting, ...] = ()
    settings: tuple[str, ...] = ()  # settings of the run that can be replaced
    positional: tuple[str, ...] = ()  # keys that may be given without their name
    overrides: tuple[str, ...] = ()  # groups of settings that --help lists
    starts: str = ""  # module:function of segpipe.cli; empty: NAME:main

    @property
    def known(self) -> list[Setting]:
        """All keys that may be given by name, except overrides."""
        return [*self.keys, *(SETTINGS[name] for name in self.settings)]


COMMANDS = {
    "train": Command(
        "train a network",
        "Starts compute.nproc processes itself; `torchrun ... -m segpipe train key=value ...` works too.\n"
        "-m: one run per combination of key=1,2,3; --cfg job: print the configuration; --config-dir FOLDER: your own\n"
        "files as in conf/.",
        overrides=ALL,
        starts="api:train_main",
    ),
    "evaluate": Command(
        "evaluate a run on a split",
        "Prints one line of JSON with `miou` and scores per class and sequence, and tables of them on stderr. Uses\n"
        "whole images at their own size, fp32 and averaged weights. Meaning of the figures: docs/evaluate.md.",
        (
            RUN,
            WHICH,
            Setting(
                "out", "", "HTML file for a report with the worst images; empty: none"
            ),
            TTA,
            TRUST,
        ),
        (
            *DATA,
            "data.sequence",
            "data.hold_out",
            "data.workers",
            "compute.device",
            "compute.threads",
        ),
    ),
    "predict": Command(
        "segment images and videos",
        "Writes masks (PNG, pixel values are class ids), overlays (JPEG, or MP4 for a video) and predictions.json\n"
        "into `out`. Give run= or artifact=. Keeps outputs that the same model already wrote. See docs/predict.md.",
        (
            Setting(
                "source",
                "images",
                "image, video, folder, glob pattern in quotes, camera (0) or stream (rtsp://...)",
                required=True,
            ),
            Setting("out", "predictions", "folder for the results", required=True),
            Setting("run", "", "folder of the run"),
            WHICH,
            Setting("artifact", "", "exported folder, instead of a run"),
            TTA,
            Setting(
                "precision",
                "fp32",
                "precision of the network; int8: exported files only",
                choices=("fp32", "bf16", "fp16", "int8"),
            ),
            Setting(
                "provider",
                "CPUExecutionProvider",
                "exported file: execution provider of onnxruntime",
            ),
            Setting("overlay", True, "write overlays"),
            Setting("alpha", 0.5, "opacity of the class colors in an overlay", high=1),
            Setting("frames", False, "video: write the mask of each frame"),
            Setting(
                "seconds", 0.0, "camera or stream: stop after this time; 0: on Ctrl-C"
            ),
            Setting(
                "exists",
                "keep",
                "if `out` holds other outputs: keep them and stop, or replace them",
                choices=("keep", "replace"),
            ),
            TRUST,
        ),
        ("compute.device", "compute.threads"),
    ),
    "doctor": Command(
        "check a data set",
        "Reports all problems in one pass, or the content of the splits if there are none. For a folder without a\n"
        "classes.yaml, it proposes one from the masks. out=doctor.html adds a page with pictures. Without\n"
        "data.root, it prints where to download a published data set and where its files belong.",
        (
            Setting(
                "out",
                "",
                "HTML page to write: problems, classes, leaks, samples, an augmented batch; empty: none",
            ),
            Setting("write", False, "write the proposed classes.yaml"),
            LINES,
        ),
        overrides=("data",),
    ),
    "pack": Command(
        "decode a data set once, for all epochs and runs",
        "segpipe pack data=folder data.root=FOLDER fills FOLDER/.segpipe-pack (or data.pack=OTHER) with training and\n"
        "validation samples, and checks existing ones. Training reads them with data.pack=auto. Run an interrupted\n"
        "command again to continue it. See docs/data.md.",
        overrides=("data",),
        starts="data_sets:pack",
    ),
    "split": Command(
        "divide a folder of images into training and validation",
        "Writes train.txt and val.txt. Whole sequences go to one side: neighboring video frames in both would inflate\n"
        "every score. The same arguments give the same lists.",
        (
            Setting(
                "val", 0.2, "share of the images for validation", low=0.01, high=0.99
            ),
            Setting(
                "by",
                "sequence",
                "unit of division; tail: validate on the last frames of each sequence",
                choices=("sequence", "image", "tail"),
            ),
            Setting(
                "pattern",
                "",
                "regular expression whose first group is the sequence; empty: see docs/data.md",
            ),
            Setting("seed", 0, "seed of the random division"),
            Setting("replace", False, "replace train.txt and val.txt"),
        ),
        ("data.root", "data.classes", "data.images", "data.masks"),
        starts="data_sets:split",
    ),
    "import": Command(
        "turn labels of another format into a data set",
        "segpipe import labelme source=FOLDER out=FOLDER writes masks, links to the images and classes.yaml, which\n"
        "data=folder reads. Reports all that cannot be imported at once, and then does not finish. Run the same\n"
        "command again to continue an interrupted import. Formats: docs/data.md.",
        (
            Setting(
                "format",
                "labelme",
                "format of the labels",
                choices=IMPORTS,
                required=True,
            ),
            Setting(
                "source",
                "FOLDER",
                "folder (or file, for coco and cvat) of the labels",
                required=True,
            ),
            Setting("out", "FOLDER", "new folder for the data set", required=True),
            Setting(
                "names",
                [],
                "classes in this order; empty: all that are found, in the order of the format",
            ),
            Setting(
                "background",
                "class",
                "how to label pixels outside all shapes",
                choices=("class", "ignore"),
            ),
            Setting(
                "ignore",
                [],
                "labels whose pixels to ignore; [0,0,0]: the label of this color",
            ),
            Setting(
                "val",
                0.0,
                "share of the images for validation, if the format has no splits; 0: none",
                high=0.99,
            ),
            Setting("copy", False, "copy the images instead of linking to them"),
            Setting("skip", False, "skip images that cannot be imported"),
            LINES,
        ),
        positional=("format",),
        starts="data_sets:import_labels",
    ),
    "export": Command(
        "export a run to model files",
        "Publishes files only if they compute what the trained network computes.",
        (RUN, WHICH, TRUST),
        (*EXPORT, *DATA),
    ),
    "verify": Command(
        "repeat all gates on an exported folder",
        "Compares the current files with the run that they claim to come from.",
        (
            Setting("artifact", "runs/NAME/export", "exported folder", required=True),
            RUN,
            WHICH,
            TRUST,
        ),
        (
            *DATA,
            "export.images",
            "export.quality_images",
            "export.critical_classes",
            "export.engines",
            "export.allow_unverified",
        ),
        starts="export:verify_main",
    ),
    "weights": Command(
        "write the weights of a run to a .safetensors file",
        "Writes the averaged weights and what is needed to use them: model.weights=FILE starts another run from them.\n"
        "docs/weights.md shows how other programs read them.",
        (
            RUN,
            WHICH,
            Setting(
                "out",
                "FILE.safetensors",
                "file to write; must not exist yet",
                required=True,
            ),
            Setting(
                "names",
                "segpipe",
                "tensor names: as in segpipe, or as in the authors' code, timm, or your own network",
                choices=("segpipe", "original"),
            ),
            TRUST,
        ),
        starts="export:weights_main",
    ),
    "compare": Command(
        "find the first difference between two runs",
        "segpipe compare runs/A runs/B prints the first step that differs and, within it, the first stage in causal\n"
        "order, shard, sample, file and layer. The runs may have used different numbers of processes.",
        (
            Setting("a", "runs/A", "folder of a run", required=True),
            Setting("b", "runs/B", "folder of the other run", required=True),
            JSON,
            TRUST,
        ),
        positional=("a", "b"),
        starts="runs:compare_main",
    ),
    "audit": Command(
        "audit a run that someone else made",
        "Checks the files of a run against each other and trains parts of it again. Writes report.json.",
        (
            RUN,
            Setting("spans", 3, "number of parts to train again", low=1),
            Setting(
                "span_steps",
                100,
                "maximum number of updates per part; 0: up to the next checkpoint",
            ),
            Setting("seed", -1, "seed that chooses the parts; -1: random", low=-1),
            Setting(
                "any_environment", False, "train even if versions or hardware differ"
            ),
            Setting("verify", True, "run the gates of the exported folder again"),
            Setting("out", "", "folder of the report; empty: <run>/audit"),
            TRUST,
        ),
        (
            "data.root",
            "data.classes",
            "data.mix",
            "data.workers",
            "data.start_method",
            "compute.device",
            "model.weights",
            "loss.teacher",
        ),
    ),
    "check-augment": Command(
        "check that augmentation is a pure function of sample and key",
        "Checks every transform, and all of them together, in two processes and in a second start of the program.",
        overrides=("data", "augment"),
        starts="checks:check_augment",
    ),
    "check-plugin": Command(
        "check your own network, loss, data set or transform",
        "segpipe check-plugin model.name=package.module:Class loss.name=... data.name=... augment.extra=[...]\n"
        "reports what would fail in training, validation or export, see docs/plugins.md.",
        overrides=("model", "loss", "data", "augment"),
        starts="checks:check_plugin",
    ),
    "describe": Command(
        "parameters, operations and latency of a network",
        "segpipe describe model=NAME size=512x1024 counts without computing, then times forward passes here.\n"
        "docs/models.md compares all networks.",
        (
            Setting("size", "1024x2048", "HEIGHTxWIDTH of the image"),
            Setting(
                "classes", 19, "number of classes; no data is read", low=1, high=255
            ),
            Setting(
                "runs", 5, "timed forward passes; latency is their median; 0: none"
            ),
            JSON,
        ),
        overrides=("model",),
        starts="speed:describe",
    ),
    "profile": Command(
        "show where an update spends its time",
        "segpipe profile experiment=... runs a few updates of a new network in this process or those of torchrun,\n"
        "prints the time of each part, and writes a trace to runs/NAME_profile. See docs/performance.md.",
        overrides=ALL,
        starts="speed:profile",
    ),
    "gpu-check": Command(
        "check this machine's GPU",
        "Runs the checks of benchmarks/gpu.py, which needs a clone of the repository. Without a GPU it checks\n"
        "nothing. See docs/gpu.md.",
        (
            Setting("part", "1", "1: correctness; 2: speed", choices=("1", "2", "all")),
            Setting("seconds", 570.0, "time limit", low=1),
            Setting("camvid", "", "folder of CamVid, to train on it too"),
            Setting("out", "gpu.jsonl", "file to append JSON rows to"),
            Setting("only", ["all"], "names of the checks to run"),
            Setting("device", "cuda", "device to check", choices=("cuda", "cpu")),
            Setting("size", 1024, "image height and width in pixels", low=64),
            Setting("batch", 12, "images per batch", low=1),
            Setting("updates", 20, "updates per measurement", low=1),
            Setting("folder", "runs", "folder for the runs of the checks"),
        ),
        starts="speed:gpu_check",
    ),
    "runs": Command(
        "compare runs in a table",
        "Lists the best run first, with the settings in which the runs differ. Unfinished runs show their last logged\n"
        "step and why they ended. out=compare.html writes a page with the table and all curves.",
        (
            Setting("root", "runs", "folder to search for runs"),
            Setting(
                "runs",
                [],
                "run folders or patterns such as runs/lr*; empty: all runs below root",
            ),
            Setting(
                "group",
                "",
                "one line per recipe, with mean and range over this setting, such as seed",
            ),
            Setting(
                "out",
                "",
                "HTML page to write: the table and the curves of the best runs",
            ),
            JSON,
        ),
    ),
}
