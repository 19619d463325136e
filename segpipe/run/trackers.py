"""The trackers: what each is given at the end of a run, and how Weights & Biases, TensorBoard and MLflow show it.

Their packages are imported when a run starts to use one.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import html
import json
import netrc
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import ConfigError
from segpipe.settings.config import Config, recipe, to_mapping

_PICTURE = re.compile(
    r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]*)"'
)  # of report.html.j2
# One service under two names: wandb 0.31 moved its default host and still accepts a login for the former one.
_WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
_MLFLOW_TAG = "segpipe.id"
_MLFLOW_BATCH = 100  # parameters that MLflow takes at once
_MLFLOW_VALUE = 500  # characters of a parameter


@dataclass(frozen=True)
class RunEnd:
    """Results of a run that has ended."""

    step: int
    miou: float | None
    iou: Mapping[str, float | None]  # by class; None: not in the validation images
    pictures: list[tuple[str, NDArray[np.uint8]]]  # caption, uint8 (H, W, 3) RGB
    files: list[Path]  # report.html and the exported folder, as far as they exist


class Mirror(Protocol):
    """A tracker that shows a run elsewhere. Every method may raise; the caller warns and goes on without it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step, by names such as `train/loss`."""

    def finish(self, end: RunEnd) -> None:
        """Results of the whole run."""

    def close(self, exit_code: int) -> None:
        """Send what is left; the run has failed if `exit_code` is not 0."""


def run_id(config: Config, run_dir: Path) -> str:
    """Id of the run in a tracker, 16 hex digits: a function of the folder's name and the recipe only.

    Settings that may change on resume (`FREE_KEYS`) do not enter, so that a resumed run continues its curve.
    """
    text = json.dumps([run_dir.name, recipe(config)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def run_end(config: Config, result: Mapping[str, Any]) -> RunEnd:
    """Results for a tracker, from result.json and the files beside it."""
    report, export = (
        config.run_dir / "report.html",
        Path(config.export.dir or config.run_dir / "export"),
    )
    pictures = _pictures(report.read_text()) if report.is_file() else []
    files = [report] * report.is_file() + [export] * (
        config.export.enabled and export.is_dir()
    )
    return RunEnd(result["steps"], result["miou"], result["iou"], pictures, files)


def _pictures(page: str) -> list[tuple[str, NDArray[np.uint8]]]:
    import cv2

    found = []
    for encoded, caption in _PICTURE.findall(page):
        image = cv2.imdecode(
            np.frombuffer(base64.b64decode(encoded), np.uint8), cv2.IMREAD_COLOR
        )
        if image is not None:
            found.append(
                (
                    html.unescape(caption),
                    np.ascontiguousarray(image[..., ::-1], dtype=np.uint8),
                )
            )
    return found


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
            resume=None
            if step is None
            else "allow",  # None replaces an earlier run with this id
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
        table = self._wandb.Table(
            columns=["class", "IoU"], data=[list(row) for row in end.iou.items()]
        )
        pictures = [
            self._wandb.Image(image, caption=caption) for caption, image in end.pictures
        ]
        self._run.log(
            {"classes": table, **({"images": pictures} if pictures else {})},
            step=end.step,
        )
        self._run.summary.update({"miou": end.miou})
        if end.files:
            artifact = self._wandb.Artifact(
                f"{self._run.id}-export", type="model", metadata={"miou": end.miou}
            )
            for path in end.files:
                artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(
                    str(path)
                )
            self._run.log_artifact(artifact)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def check_login(config: Config) -> None:
    """Raise ConfigError if wandb is online without a login.

    Looks where wandb looks for a key (WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, netrc, its settings files) and opens no
    connection, so it can run before the first step. An invalid key shows only online.
    """
    if config.track.mode == "online" and not _has_login():
        raise ConfigError(
            "track.mode = online, but no wandb login was found. Run `wandb login` once, set WANDB_API_KEY, or record "
            "without an account by track.mode=offline."
        )


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _wandb_settings()
    server = urlsplit(
        os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or ""
    ).netloc
    hosts = _WANDB_HOSTS if server in ("", *_WANDB_HOSTS) else (server,)
    return bool(settings.get("api_key")) or _netrc_has_login(hosts)


def _wandb_settings() -> dict[str, str]:
    """Settings from the files of `wandb login` and `wandb init`; those of the working directory win."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([folder / "settings", Path("wandb") / "settings"])
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _netrc_has_login(hosts: tuple[str, ...]) -> bool:
    chosen = os.environ.get("NETRC")
    paths = (
        Path(name).expanduser()
        for name in ([chosen] if chosen else ["~/.netrc", "~/_netrc"])
    )
    path = next((path for path in paths if path.is_file()), None)
    try:
        logins = netrc.netrc(path) if path else None
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return False
    entries = [logins.authenticators(host) for host in hosts] if logins else []
    return any(entry and entry[2] for entry in entries)


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
            self._writer.add_hparams(
                self._settings, {"miou": end.miou}, run_name=".", global_step=end.step
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
        self._client: Any = mlflow.MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or files
        )
        known = self._client.get_experiment_by_name(config.track.project)
        experiment = (
            known.experiment_id
            if known
            else self._client.create_experiment(config.track.project)
        )
        own = run_id(config, run_dir)
        earlier = (
            []
            if step is None
            else self._client.search_runs(
                [experiment], f"tags.`{_MLFLOW_TAG}` = '{own}'"
            )
        )
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(
            experiment, run_name=config.run.name, tags={_MLFLOW_TAG: own}
        ).info.run_id
        params = [
            entities.Param(key, str(value)[:_MLFLOW_VALUE])
            for key, value in recipe(config).items()
        ]
        for start in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(
                self._id, params=params[start : start + _MLFLOW_BATCH]
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(_name(name), float(value), now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, end: RunEnd) -> None:
        ious = {
            f"class_iou/{name}": iou
            for name, iou in {**end.iou, "mean": end.miou}.items()
            if iou is not None
        }
        self.log(end.step, ious)
        for number, (caption, image) in enumerate(end.pictures):
            _log_picture(
                self._client,
                self._id,
                f"images/{number:02d} {_name(caption)}.jpg",
                image,
            )
        for path in end.files:
            if path.is_dir():
                self._client.log_artifacts(self._id, str(path), "export")
            else:
                self._client.log_artifact(self._id, str(path))

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


def _name(text: str) -> str:
    """`text` with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", text)


def _log_picture(client: Any, run: str, place: str, image: NDArray[np.uint8]) -> None:
    import cv2

    folder, _, name = place.rpartition("/")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / name.replace("/", "_")
        cv2.imwrite(str(path), image[..., ::-1])
        client.log_artifact(run, str(path), folder)
