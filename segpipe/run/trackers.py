"""Trackers, which show a run elsewhere: Weights & Biases, TensorBoard, MLflow, or a class of your own.

`track.name=package.module:Class` names your own; `Mirror` is what it has to be. Packages are imported when a run starts
to use one.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import netrc
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from segpipe import plugins
from segpipe.errors import ConfigError
from segpipe.settings.config import Config, recipe, to_mapping

# One service under two names: wandb 0.31 moved its default host and still accepts a login for the former one.
_WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
_MLFLOW_TAG = "segpipe.id"
_MLFLOW_BATCH = 100  # parameters that MLflow takes at once
_MLFLOW_VALUE = 500  # characters of a parameter

Picture = tuple[str, NDArray[np.uint8]]  # caption, uint8 (H, W, 3) RGB


@dataclass(frozen=True)
class RunEnd:
    """Results of a run that has ended."""

    step: int
    miou: float | None
    iou: Mapping[str, float | None]  # by class; None: not in the validation images
    pictures: list[Picture]  # those of the report
    files: list[Path]  # report.html and the exported folder, as far as they exist


class Mirror(Protocol):
    """A tracker. Every method may raise; the caller warns and goes on without it.

    Called with the configuration, the run's folder, and the update at which a resumed run goes on, or None.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step, by names such as `train/loss`."""

    def finish(self, end: RunEnd) -> None:
        """Results of the whole run."""

    def close(self, exit_code: int) -> None:
        """Send what is left; the run has failed if `exit_code` is not 0."""


def mirror_class(config: Config) -> Callable[[Config, Path, int | None], Mirror] | None:
    """The class that track.name stands for; None for none. Raises ConfigError for one of your own that is not there."""
    name = config.track.name
    if name in TRACKERS:
        return TRACKERS[name][1]
    if not plugins.is_path(name):
        return None
    plugins.trust([name])  # only `segpipe train` opens trackers: the user named it
    own: Callable[[Config, Path, int | None], Mirror] = plugins.load("track.name", name)
    return own


def check_ready(config: Config) -> None:
    """Raise ConfigError if the tracker's package is not installed, or wandb is online without a login."""
    name = config.track.name
    if mirror_class(config) and name in TRACKERS and find_spec(name) is None:
        raise ConfigError(
            f"track.name = {name}, but {name} is not installed. Run pip install "
            f"{TRACKERS[name][0]}, or set track=none."
        )
    if name == "wandb" and config.track.mode == "online" and not _has_login():
        raise ConfigError(
            "track.mode = online, but no wandb login was found. Run `wandb login` "
            "once, set WANDB_API_KEY, or record without an account by "
            "track.mode=offline."
        )


def run_id(config: Config, run_dir: Path) -> str:
    """Id of the run in a tracker, 16 hex digits: a function of the folder's name and the recipe only.

    Settings that may change on resume (`FREE_KEYS`) do not enter, so that a resumed run continues its curve.
    """
    text = json.dumps([run_dir.name, recipe(config)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def run_end(
    config: Config, result: Mapping[str, Any], pictures: list[Picture]
) -> RunEnd:
    """Results for a tracker, from result.json and the files beside it."""
    files = [config.run_dir / "report.html"]
    if config.export.enabled:
        files.append(Path(config.export.dir or config.run_dir / "export"))
    existing = [path for path in files if path.exists()]
    return RunEnd(result["steps"], result["miou"], result["iou"], pictures, existing)


def _has_login() -> bool:
    """Whether wandb would find a key; an invalid one shows only online.

    Looks where wandb looks: WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, its settings files, netrc. `wandb.login` of 0.31
    opens a connection, so it cannot run before the first step.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([folder / "settings", Path("wandb") / "settings"])
    except (configparser.Error, OSError, UnicodeDecodeError):
        parser.clear()
    if parser.get("default", "api_key", fallback=""):
        return True
    server = parser.get("default", "base_url", fallback="")
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or server).netloc
    return _netrc_has_login(_WANDB_HOSTS if host in ("", *_WANDB_HOSTS) else (host,))


def _netrc_has_login(hosts: tuple[str, ...]) -> bool:
    names = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    paths = [path for name in names if (path := Path(name).expanduser()).is_file()]
    try:
        return any(netrc.netrc(paths[0]).authenticators(host) for host in hosts)
    except (IndexError, netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return False


class WandbMirror:
    """The wandb run with the id of this recipe and folder."""

    def __init__(self, config: Config, run_dir: Path, step: int | None) -> None:
        if config.track.mode == "offline":
            # wandb 0.31 sends a report of its start over the network even offline, unless this is set.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # takes a second and starts a service process

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=config.track.project,
            entity=config.track.entity or None,
            name=config.run.name,
            id=run_id(config, run_dir),
            resume=None if step is None else "allow",  # None replaces an earlier run
            dir=str(run_dir),
            mode="offline" if config.track.mode == "offline" else "online",
            config=to_mapping(config),
            save_code=False,
            # Leave our output alone and never prompt.
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, end: RunEnd) -> None:
        rows = [list(row) for row in end.iou.items()]
        shown = {"classes": self._wandb.Table(columns=["class", "IoU"], data=rows)}
        if end.pictures:
            shown["images"] = [
                self._wandb.Image(image, caption=caption)
                for caption, image in end.pictures
            ]
        self._run.log(shown, step=end.step)
        self._run.summary.update({"miou": end.miou})
        if not end.files:
            return
        artifact = self._wandb.Artifact(
            f"{self._run.id}-export", type="model", metadata={"miou": end.miou}
        )
        for path in end.files:
            if path.is_dir():
                artifact.add_dir(str(path))
            else:
                artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorboardMirror:
    """Event files of the run; a resumed run continues them, and hides what will be written again."""

    def __init__(self, config: Config, run_dir: Path, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call]
            str(run_dir / "tensorboard"), purge_step=None if step is None else step + 1
        )
        self._settings = {
            key: value if isinstance(value, bool | int | float) else str(value)
            for key, value in recipe(config).items()
        }

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, end: RunEnd) -> None:
        for caption, image in end.pictures:
            self._writer.add_image(caption, image, end.step, dataformats="HWC")
        if end.miou is not None:
            scores = {"miou": end.miou}
            self._writer.add_hparams(
                self._settings, scores, run_name=".", global_step=end.step
            )

    def close(self, exit_code: int) -> None:
        self._writer.close()  # TensorBoard knows no failed runs


class MlflowMirror:
    """The MLflow run that bears the id of this recipe and folder; a resumed run continues it."""

    def __init__(self, config: Config, run_dir: Path, step: int | None) -> None:
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        # MLflow's default is a database, which mlflow-skinny cannot use; 3.x asks to allow files.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        files = (Path(config.run.root) / "mlruns").resolve().as_uri()
        store = os.environ.get("MLFLOW_TRACKING_URI") or files
        self._client: Any = mlflow.MlflowClient(store)
        project, own = config.track.project, run_id(config, run_dir)
        if known := self._client.get_experiment_by_name(project):
            experiment = known.experiment_id
        else:
            experiment = self._client.create_experiment(project)
        if step is not None:
            query = f"tags.`{_MLFLOW_TAG}` = '{own}'"
            for earlier in self._client.search_runs([experiment], query)[:1]:
                self._id = earlier.info.run_id
                self._client.update_run(self._id, status="RUNNING")
                return
        tags = {_MLFLOW_TAG: own}
        made = self._client.create_run(experiment, run_name=config.run.name, tags=tags)
        self._id = made.info.run_id
        params = [
            entities.Param(key, str(value)[:_MLFLOW_VALUE])
            for key, value in recipe(config).items()
        ]
        for start in range(0, len(params), _MLFLOW_BATCH):
            batch = params[start : start + _MLFLOW_BATCH]
            self._client.log_batch(self._id, params=batch)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(_name(name), float(value), now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, end: RunEnd) -> None:
        ious = {**end.iou, "mean": end.miou}.items()
        known = {f"class_iou/{name}": iou for name, iou in ious if iou is not None}
        self.log(end.step, known)
        for number, (caption, image) in enumerate(end.pictures):
            self._log_picture(f"{number:02d} {_name(caption)}.jpg", image)
        for path in end.files:
            if path.is_dir():
                self._client.log_artifacts(self._id, str(path), "export")
            else:
                self._client.log_artifact(self._id, str(path))

    def _log_picture(self, name: str, image: NDArray[np.uint8]) -> None:
        import cv2

        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / name.replace("/", "_")
            cv2.imwrite(str(path), image[..., ::-1])
            self._client.log_artifact(self._id, str(path), "images")

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


def _name(text: str) -> str:
    """`text` with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", text)


# track.name -> what pip calls its package, and its class
TRACKERS: dict[str, tuple[str, Callable[[Config, Path, int | None], Mirror]]] = {
    "wandb": ("wandb", WandbMirror),
    "tensorboard": ("tensorboard", TensorboardMirror),
    "mlflow": ("mlflow-skinny", MlflowMirror),
}
