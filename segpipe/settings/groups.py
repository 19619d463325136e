"""The groups of settings, one dataclass each: every setting with its default, meaning and range. Holds no logic."""

from dataclasses import dataclass
from typing import Any

from segpipe.settings.setting import setting

MODEL_NAMES = (
    "fast_scnn", "ddrnet23_slim", "ddrnet23", "ddrnet39", "pidnet_s", "pidnet_m", "pidnet_l", "erfnet", "dabnet",
    "regseg", "regseg_exp53", "bisenetv2", "stdc1", "stdc2", "pp_liteseg_t", "pp_liteseg_b", "lraspp",
    "efficientvit_seg_b0", "efficientvit_seg_b1", "timm", "smp",
)  # fmt: skip
FILE_SETS = (
    "folder", "ade20k", "bdd100k", "camvid", "camvid32", "cityscapes", "cityscapes_coarse", "coco_stuff", "rellis3d",
    "rugd", "vistas", "voc",
)  # fmt: skip
DATA_NAMES = ("synthetic", *FILE_SETS)
STEPS = 400  # train.steps unless it is set
# Number of real images that an exported file must be compared on to count as verified.
ENOUGH_IMAGES = 16


@dataclass(slots=True)
class RunConfig:
    name: str = setting(
        "run", "run folder below run.root; conf/ sets it to DATA-MODEL-seedN"
    )
    root: str = setting("runs", "folder that holds the runs")
    exists: str = setting(
        "error",
        "what to do if the folder already holds a run",
        choices=("error", "resume", "replace"),
    )
    allow_fingerprint_change: bool = setting(
        False, "resume even if versions or hardware differ; the bits may then differ"
    )


@dataclass(slots=True)
class ModelConfig:
    name: str = setting(
        "fast_scnn",
        "network; for your own, see docs/plugins.md",
        choices=MODEL_NAMES,
        plugin=True,
    )
    args: dict[str, Any] = setting({}, "arguments of the network: model.args.KEY=VALUE")
    weights: str = setting(
        "",
        "initial weights: a file or a run folder, see docs/weights.md; empty: random, from the seed",
        free=True,
    )
    weights_sha256: str = setting(
        "", "required SHA-256 of the model.weights file; filled in at the start"
    )
    weights_partial: bool = setting(
        False,
        "load only the tensors of model.weights that fit, such as those of an encoder",
    )
    freeze: list[str] = setting(
        [], "name patterns of parameters that are not trained, such as [detail.*]"
    )
    standardize: bool = setting(
        False,
        "normalize each image to mean 0 and variance 1 (less where it is almost uniform), see docs/models.md",
    )
    norm: str = setting(
        "batch",
        "BatchNorm statistics: per shard, or over all ranks (GPUs, compute.mode=ddp or off)",
        choices=("batch", "sync"),
    )


@dataclass(slots=True)
class DataConfig:
    name: str = setting("synthetic", "data set", choices=DATA_NAMES, plugin=True)
    args: dict[str, Any] = setting(
        {}, "arguments of your own data set: data.args.KEY=VALUE"
    )
    root: str = setting("", "folder of the data set; not used by synthetic", free=True)
    mix: list[Any] = setting(
        [],
        "data sets to train on together, as {root: FOLDER, name: KIND, weight: SHARE, map: {CLASS: SHARED CLASS}}, see "
        "docs/sampling.md",
        item={},
    )
    balance: float = setting(
        0.0,
        "oversample images with a class that occurs in less than this fraction of images; 0: each image once per epoch",
        high=1,
    )
    balance_by: str = setting(
        "class",
        "what to balance; sequence: draw every sequence (drive) equally often, with data.balance=0",
        choices=("class", "sequence"),
    )
    train_split: str = setting(
        "train", "training split; train+val joins two, which is a different protocol"
    )
    split: str = setting("val", "split that validation reads")
    sequence: str = setting(
        "",
        "regular expression that finds an image's sequence (drive) in its name; empty: its folder, or the name up "
        "to the last number",
    )
    hold_out: str = setting(
        "",
        "sequence to leave out of training and validate on instead, see docs/evaluate.md",
    )
    classes: str = setting(
        "",
        "YAML class table; empty: <data.root>/classes.yaml, or the published data set's own",
        free=True,
    )
    images: str = setting(
        "",
        "folder: images below data.root, as FOLDER/SPLIT or FOLDER/SPLIT/*ENDING; empty: detected",
    )
    masks: str = setting(
        "", "folder: masks below data.root, in the same form; empty: detected"
    )
    allow_overlap: bool = setting(
        False, "train even if validation reads the same images", free=True
    )
    size: list[int] = setting(
        [192, 384], "synthetic: [height, width] in pixels", length=2, low=32, high=8192
    )
    num_train: int = setting(
        2000, "synthetic: number of distinct training scenes", low=1, high=10**7
    )
    num_val: int = setting(
        64, "synthetic: number of validation scenes", low=1, high=10**7
    )
    verify: str = setting(
        "auto",
        "how much of each file to read before the first step",
        choices=("auto", "full", "headers"),
        free=True,
    )
    max_pixels: int = setting(
        10**8,
        "largest image allowed, in pixels; larger ones are refused at the start",
        low=1,
        free=True,
    )
    hash: bool = setting(
        True,
        "write the SHA-256 of all files to inputs.json, for audits; reads each file once",
        free=True,
    )
    workers: int = setting(
        2,
        "loader processes per rank; 0 loads in the training process",
        high=256,
        free=True,
    )
    start_method: str = setting(
        "fork",
        "how loader processes start",
        choices=("fork", "forkserver", "spawn"),
        free=True,
    )
    cache_mib: int = setting(
        0,
        "cache for decoded samples, in MiB: one per loader process for training, and one per rank for validation, so "
        "that later validations need not load them",
        free=True,
    )
    pack: str = setting(
        "off",
        "keep decoded samples on disk in a pack, see docs/data.md; auto: below data.root; or a FOLDER",
        free=True,
    )
    prefetch: int = setting(
        4,
        "shard batches that each loader process prepares ahead",
        low=1,
        high=1024,
        free=True,
    )
    timeout_s: float = setting(
        300.0,
        "seconds without an answer from a loader process before the run stops",
        low=1,
        free=True,
    )


@dataclass(slots=True)
class AugmentConfig:
    crop_size: Any = setting(
        [192, 384],
        "[height, width] of the crop in pixels; auto: from the sizes of the training images; set by each conf/data",
        length=2,
        low=32,
        high=8192,
        auto=True,
    )
    scale: list[float] = setting(
        [0.75, 1.5],
        "[smallest, largest] factor of the random resize, log-uniform",
        length=2,
        low=0.1,
        high=10,
    )
    rare_crop: float = setting(
        0.0,
        "probability of a crop around a pixel of a class that is rare in its image, see docs/sampling.md",
        high=1,
    )
    flip: float = setting(0.5, "probability of a horizontal flip", high=1)
    brightness: float = setting(0.2, "largest relative change of brightness", high=1)
    contrast: float = setting(
        0.2, "largest relative change of contrast, around ImageNet's mean color", high=1
    )
    gamma: list[float] = setting(
        [1.0, 1.0],
        "[smallest, largest] gamma exponent, applied before the other color changes; above 1: darker",
        length=2,
        low=0.1,
        high=10,
    )
    saturation: float = setting(0.2, "largest relative change of saturation", high=1)
    hue: float = setting(0.02, "largest shift of the hue (in YIQ), in turns", high=0.5)
    extra: list[str] = setting(
        [],
        "further transforms by name, or package.module:Class of your own",
        plugin=True,
    )
    check: bool = setting(
        True,
        "check before training that augmentation is a pure function of sample and key",
        free=True,
    )
    canary: int = setting(
        1000,
        "augment one in n samples again in another process and compare; 0: none",
        high=10**6,
        free=True,
    )
    keyed: bool = setting(
        True,
        "false, for comparison: albumentations' own random state, as in other trainers",
    )


@dataclass(slots=True)
class LossConfig:
    name: str = setting(
        "cross_entropy",
        "loss of the class heads",
        choices=("cross_entropy", "ohem", "focal"),
        plugin=True,
    )
    args: dict[str, Any] = setting(
        {}, "arguments of your own loss: loss.args.KEY=VALUE"
    )
    class_weights: Any = setting(
        "none",
        "weight of each class, with mean 1 over the training pixels: logX: 1 / log(X + frequency) with 1 < X <= 2, "
        "log: log1.02, sqrt: 1 / sqrt(frequency); a list: used unchanged, in class order",
        choices=("none", "log", "sqrt"),
        family=("log1.10", r"log1\.(?=0*[1-9])\d{1,4}|log2(\.0{1,4})?"),
        item=1.0,
    )
    label_smoothing: float = setting(
        0.0,
        "share of the target spread evenly over all classes, in the class heads",
        high=1,
    )
    # Free, because a run's fingerprint holds the backend it resolves to, and a resume compares fingerprints.
    backend: str = setting(
        "auto",
        "what computes upsampling and loss: native (compiled, CPU) and triton (CUDA) never hold logits at full "
        "resolution; plain does. auto: triton on CUDA, native on a CPU with a C compiler, else plain",
        choices=("auto", "native", "triton", "plain"),
        free=True,
    )
    aux_weight: float = setting(0.4, "weight of each auxiliary class head")
    stride: int = setting(
        1, "the main head's loss reads every n-th row and column", low=1, high=8
    )
    aux_stride: int = setting(
        1, "the same for the auxiliary class heads", low=1, high=8
    )
    dice_weight: float = setting(
        0.0, "weight of a soft Dice loss on the main head; all classes count equally"
    )
    lovasz_weight: float = setting(
        0.0,
        "weight of Lovasz-softmax, an IoU surrogate, on the main head; needs logits at full resolution",
    )
    teacher: str = setting(
        "",
        "teacher for distillation into the main head: folder of a trained run, or one of its checkpoints",
        free=True,
    )
    teacher_sha256: str = setting(
        "", "required SHA-256 of the loss.teacher checkpoint; filled in at the start"
    )
    teacher_weight: float = setting(1.0, "weight of the divergence from the teacher")
    temperature: float = setting(
        1.0, "divides the logits of network and teacher in that loss", low=0.01
    )
    boundary_weight: float = setting(
        20.0, "weight of the boundary head, if the network has one"
    )
    boundary: str = setting(
        "band",
        "target of the boundary head; band: pixels near another class, as in PIDNet; detail: edges of a Laplacian "
        "pyramid, with cross-entropy and Dice, as in STDC",
        choices=("band", "detail"),
    )
    focal_gamma: float = setting(
        2.0, "focal: exponent of (1 - probability of the correct class)"
    )
    ohem_threshold: float = setting(
        0.7,
        "ohem: pixels whose correct class has a higher probability are easy",
        high=1,
    )
    ohem_min_kept: float = setting(
        0.0625, "ohem: smallest fraction of a shard's pixels to keep", high=1
    )


@dataclass(slots=True)
class OptimConfig:
    name: str = setting("sgd", "optimizer", choices=("sgd", "adamw"))
    lr: float = setting(0.05, "learning rate after the warm-up", high=3e38)
    momentum: float = setting(0.9, "sgd: momentum", high=1)
    betas: list[float] = setting(
        [0.9, 0.999], "adamw: decay rates of the two moments", length=2, high=1 - 1e-9
    )
    weight_decay: float = setting(5e-4, "weight decay; not applied to norms and biases")
    schedule: str = setting(
        "poly", "decay of the learning rate", choices=("poly", "cosine")
    )
    power: float = setting(0.9, "poly: exponent")
    schedule_steps: int = setting(
        0, "updates after which the learning rate reaches 0; 0: train.steps"
    )
    warmup_steps: int = setting(20, "updates of linear warm-up")
    clip_norm: float = setting(0.0, "largest gradient norm; 0: no clipping")
    lr_scale: dict[str, Any] = setting(
        {},
        "{pattern of parameter names: factor of their learning rate}",
        low=1e-9,
        item=1.0,
    )


@dataclass(slots=True)
class EmaConfig:
    decay: float = setting(
        0.99,
        "decay of the averaged weights, at most (1 + n) / (10 + n) after n updates; 0: no averaging",
        high=1,
    )


@dataclass(slots=True)
class TrainConfig:
    steps: int = setting(STEPS, "number of updates; 0: given by train.epochs")
    epochs: int = setting(
        0,
        "as many samples as this times the training images, not train.steps; 0: use train.steps",
    )
    precision: str = setting(
        "fp32",
        "precision of the network; the loss is fp32, or close to it with tf32 and without Triton",
        choices=("fp32", "tf32", "bf16", "fp16"),
    )
    channels_last: bool = setting(True, "memory format NHWC")
    log_every: int = setting(
        10, "updates between lines of metrics.jsonl", low=1, free=True
    )
    log_every_s: float = setting(
        2.0,
        "minimum seconds between these lines on a GPU, since each one waits for the GPU",
        free=True,
    )
    validate_every: int = setting(
        0, "updates between validations; 0: only at the end", free=True
    )
    patience: int = setting(
        0, "stop after this many validations in a row without a better mIoU; 0: never"
    )
    progress: bool = setting(True, "show progress", free=True)


@dataclass(slots=True)
class ComputeConfig:
    mode: str = setting(
        "elastic",
        "which runs are bit-identical: ddp: with the same number of processes; elastic, audit: with any number",
        choices=("off", "ddp", "elastic", "audit"),
    )
    nproc: str = setting(
        "auto",
        "processes on this machine; auto: the number of GPUs, at most compute.shards, or 1",
        free=True,
    )
    device: str = setting("auto", "device to train on", choices=("auto", "cpu", "cuda"))
    shards: int = setting(
        4,
        "logical shards, at least one per process; the global batch is shards * samples_per_shard",
        low=1,
        high=65536,
    )
    # At least 2: global pooling leaves BatchNorm one value per image.
    samples_per_shard: int = setting(4, "samples per logical shard", low=2, high=65536)
    threads: int = setting(
        2, "intra-op threads per process; on a CPU, changes the bits", low=1, high=1024
    )
    compile: bool = setting(
        False,
        "torch.compile for the network; changes the bits, see docs/performance.md",
    )
    cuda_graph: str = setting(
        "auto",
        "GPU, mode elastic: record the network's passes at the first batch and replay them; on: for any network",
        choices=("auto", "on", "off"),
        free=True,
    )
    ledger: bool = setting(
        True,
        "write digests of every step, and compare the state across ranks",
        free=True,
    )
    timeout_s: float = setting(
        600.0, "timeout of a collective in seconds", low=1, free=True
    )


@dataclass(slots=True)
class CheckpointConfig:
    every: int = setting(100, "updates between writes of last.pt; 0: only at the end")
    every_s: float = setting(30.0, "minimum seconds between these writes on a GPU")
    keep_every: int = setting(
        0, "updates between checkpoints kept as step_NNNNNN.pt, for audits; 0: none"
    )
    keep_last: int = setting(0, "how many of the newest step_NNNNNN.pt to keep; 0: all")


@dataclass(slots=True)
class TrackConfig:
    name: Any = setting(
        "none",
        "experiment tracker, or a list of several, see docs/sweeps.md; metrics.jsonl is always written",
        choices=("none", "wandb", "tensorboard", "mlflow", "prometheus"),
        plugin=True,
        item="",
    )
    project: str = setting(
        "", "wandb: project, mlflow: experiment; empty: WANDB_PROJECT, or segpipe"
    )
    entity: str = setting("", "wandb: user or team; empty: WANDB_ENTITY")
    mode: str = setting(
        "auto",
        "wandb: send now, store for a later `wandb sync`, or neither; auto: WANDB_MODE, or online",
        choices=("auto", "online", "offline", "disabled"),
    )
    group: str = setting(
        "",
        "wandb: group of runs, empty: WANDB_RUN_GROUP; mlflow: parent run, for example of a sweep",
    )
    metrics: str = setting(
        "9464",
        "prometheus: port on 127.0.0.1 of a machine's first process, others take the next; or a folder for text files",
    )
    job_type: str = setting("", "wandb: type of the run; empty: WANDB_JOB_TYPE")
    tags: list[str] = setting([], "wandb: tags of the run; empty: WANDB_TAGS")
    notes: str = setting("", "wandb: notes on the run; empty: WANDB_NOTES")

    @property
    def names(self) -> list[str]:
        """The trackers; empty for none."""
        names = self.name if isinstance(self.name, list) else [self.name]
        return [name for name in names if name != "none"]


@dataclass(slots=True)
class ExportConfig:
    enabled: bool = setting(True, "export after training")
    formats: list[str] = setting(
        ["onnx", "torchscript"], "model files to write", choices=("onnx", "torchscript")
    )
    profile: str = setting(
        "robot",
        "inputs and outputs of the model, see docs/export.md",
        choices=("robot", "isaac"),
    )
    precision: list[str] = setting(
        ["fp32"], "precisions of the ONNX files", choices=("fp32", "fp16", "int8")
    )
    engines: list[str] = setting(
        [],
        "engines, besides onnxruntime, in which every ONNX file must pass the gates",
        choices=("openvino", "openvino_bf16"),
    )
    mask_stride: int = setting(
        1,
        "1: masks of image size; the network's output stride: smaller masks, without the last upsampling",
        low=1,
    )
    images: int = setting(
        ENOUGH_IMAGES, "validation images that the gates compare", low=1
    )
    quality_images: int = setting(
        100, "validation images for the mIoU gate and the temperature fit", low=1
    )
    critical_classes: list[str] = setting(
        [], "classes whose IoU an int8 file must not lower by 2 points"
    )
    latency_budget_ms: float = setting(
        0.0, "maximum time per image on one CPU thread of this machine; 0: no limit"
    )
    allow_unverified: bool = setting(
        False, "export without the data set, marked UNVERIFIED_REAL_DATA"
    )
    height: int = setting(
        0, "image height without a data set; 0: from the validation images", high=65536
    )
    width: int = setting(
        0, "image width without a data set; 0: from the validation images", high=65536
    )
    dir: str = setting("", "folder of the exported files; empty: <run folder>/export")
