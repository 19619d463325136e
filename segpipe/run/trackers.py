"""Trackers, which show a run elsewhere: Weights & Biases, TensorBoard, MLflow, Prometheus, or your own class.

`track.name=package.module:Class` names your own. Packages are imported when a run starts to use them. A tracker has
some of these methods, which a separate thread calls in order, and which may raise:

    on_start(config, step): before the first update; `step` is above 0 if the run is resumed
    on_metrics(step, metrics): figures of one step by name, such as `train/loss`
    on_validation(step, scores, pictures): after each validation: miou, iou by class, `confusion` int64 (C, C), `names`
        and `palette` of the classes; pictures are the first image of the split, the same each time, and the worst ones
    on_end(result): at the end: `exit_code`, and for a finished run also result.json and the list `files`
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from segpipe import plugins
from segpipe.distributed import environment
from segpipe.errors import ConfigError
from segpipe.ledger.rows import ledger_path
from segpipe.run.pages import Picture
from segpipe.settings.config import Config, recipe, to_mapping
from segpipe.settings.setting import Values

Figures = dict[str, float]
Pictures = Sequence[Picture]

_METHODS = ("on_start", "on_metrics", "on_validation", "on_end")
_PROJECT = "segpipe"
# Values of WANDB_MODE: run and dryrun are older names of online and offline.
_WANDB_MODES = ("online", "offline", "disabled", "shared", "run", "dryrun")
_WANDB_KEYS = ("entity", "group", "job_type", "tags", "notes")  # of `track`
_MLFLOW_TAG, _MLFLOW_GROUP = "segpipe.id", "segpipe.group"
_MLFLOW_VALUE = 500  # characters of a parameter


Tracked = Callable[[], Any]  # a class as the module's docstring describes


def tracker_classes(config: Config) -> dict[str, Tracked]:
    """The classes that track.name selects. Raises ConfigError if a class of your own cannot be found."""
    names = config.track.names
    own = list(filter(plugins.is_path, names))
    plugins.trust(own)  # only `segpipe train` tracks: the user named it
    return {
        name: plugins.load("track.name", name) if name in own else TRACKERS[name][1]
        for name in names
    }


def check_tracking(config: Config) -> None:
    """Raise ConfigError if a tracker's package is not installed, wandb has no login, or nothing would be called."""
    classes = tracker_classes(config)
    for name, kind in classes.items():
        if isinstance(kind, type) and not any(hasattr(kind, one) for one in _METHODS):
            raise ConfigError(
                f"track.name = {name}, but the class has none of the methods {', '.join(_METHODS)}. See docs/sweeps.md."
            )
        package = {"prometheus": "prometheus_client"}.get(name, name)
        if name in TRACKERS and find_spec(package) is None:
            raise ConfigError(
                f"track.name = {name}, but {package} is not installed. Run pip install "
                f"{TRACKERS[name][0]}, or set track=none."
            )
    if "wandb" not in classes:
        return
    given = os.environ.get("WANDB_MODE", "online")  # read even if track.mode is set
    if given not in _WANDB_MODES:
        raise ConfigError(
            f"WANDB_MODE = '{given}', but wandb supports {', '.join(_WANDB_MODES)}. Correct or unset it."
        )
    if _mode(config) == "online" and not _has_login():
        raise ConfigError(
            "track.mode = online, but no wandb login was found. Run `wandb login` once, set WANDB_API_KEY, or record "
            "without an account with track.mode=offline."
        )


def _mode(config: Config) -> str:
    mode = config.track.mode
    return os.environ.get("WANDB_MODE", "online") if mode == "auto" else mode


def _has_login() -> bool:
    """Whether wandb would find a key in its variables, settings files or netrc; only its server detects a revoked one.

    `wandb.login` of 0.31 opens a connection, so it cannot run before the first step.
    """
    import wandb
    from wandb.sdk.lib.wbauth import wbnetrc

    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        return wbnetrc.read_netrc_auth(host=settings.base_url) is not None
    except wandb.errors.AuthenticationError:  # too short for a key
        return False


def run_id(config: Config, run_dir: Path) -> str:
    """Id of the run in a tracker, 16 hex digits: a function only of the folder's name and the recipe.

    Settings that may change on resume do not affect it, so a resumed run continues its curve.
    """
    text = json.dumps([run_dir.name, recipe(config)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Wandb:
    """The wandb run with the id of this recipe and folder, or WANDB_RUN_ID."""

    def on_start(self, config: Config, step: int) -> None:
        """Start the run, or continue it."""
        mode: Any = _mode(config)
        track = config.track
        if mode == "offline":
            # wandb 0.31 reports its start over the network even offline, unless this is set.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # takes a second and starts a service process

        self._wandb: Any = wandb
        self._config = config
        self._run: Any = wandb.init(
            project=track.project or os.environ.get("WANDB_PROJECT", _PROJECT),
            **{key: getattr(track, key) or None for key in _WANDB_KEYS},
            name=config.run.name,
            id=os.environ.get("WANDB_RUN_ID") or run_id(config, config.run_dir),
            resume="allow" if step else None,  # None replaces an earlier run
            dir=str(config.run_dir),
            mode=mode,
            config=to_mapping(config),
            save_code=False,
            # Do not capture our output, and never prompt.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("validation/miou", summary="max")

    def on_metrics(self, step: int, metrics: Figures) -> None:
        """Log the figures."""
        self._run.log(metrics, step=step)

    def on_validation(self, step: int, scores: Values, pictures: Pictures) -> None:
        """Log the confusion matrix, and each picture with its masks side by side."""
        names = scores["names"]
        cells = [
            [names[row], names[column], int(count)]
            for (row, column), count in np.ndenumerate(scores["confusion"])
        ]
        columns = ["Actual", "Predicted", "nPredictions"]
        matrix = self._wandb.Table(columns=columns, data=cells)
        shown = {
            "confusion": self._wandb.plot_table(
                "wandb/confusion_matrix/v1", matrix, {key: key for key in columns}
            ),
            "pictures": [
                self._wandb.Image(panels, caption=caption)
                for _, caption, panels in _side_by_side(scores, pictures)
            ],
        }
        self._run.log(shown, step=step)

    def on_end(self, result: Values) -> None:
        """Log the model as output artifact and the data as input artifact, and end the run."""
        files = {path.name: path for path in result.get("files", ())}
        data, run = self._config.data, self._run
        inputs = files.pop("inputs.json", None)
        if files:
            scores = {key: result[key] for key in ("miou", "best_miou")}
            name = f"{run.id}-model"
            run.log_artifact(self._artifact(name, "model", files.values(), scores))
            run.summary.update(scores)
        if inputs:
            about = {"root": str(data.root), "split": data.split}
            # One artifact for all runs on this data, with characters that wandb accepts.
            roots = [data.root, *(entry.get("root", "") for entry in data.mix)]
            names = [Path(root).resolve().name for root in roots if root]
            name = "-".join([data.name, *names])
            name = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:128]
            artifact = self._artifact(name, "dataset", [inputs], about)
            # Last: online, this waits for wandb.
            log = run.log_artifact if run.offline else run.use_artifact
            log(artifact)
        run.finish(exit_code=result["exit_code"])

    def _artifact(
        self, name: str, kind: str, paths: Iterable[Path], about: Values
    ) -> Any:
        artifact = self._wandb.Artifact(name, type=kind, metadata=about)
        for path in paths:
            add = artifact.add_dir if path.is_dir() else artifact.add_file
            add(str(path), name=path.name)
        return artifact


class Tensorboard:
    """Event files of the run; a resumed run continues them and hides steps that will be repeated."""

    def on_start(self, config: Config, step: int) -> None:
        """Open an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call]
            str(config.run_dir / "tensorboard"), purge_step=step + 1
        )
        self._settings = {
            key: value if isinstance(value, int | float) else str(value)
            for key, value in recipe(config).items()
        }

    def on_metrics(self, step: int, metrics: Figures) -> None:
        """Write the figures."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def on_validation(self, step: int, scores: Values, pictures: Pictures) -> None:
        """Write each picture with its masks side by side."""
        for name, _, panels in _side_by_side(scores, pictures):
            self._writer.add_image(name, panels, step, dataformats="HWC")

    def on_end(self, result: Values) -> None:
        """Write the settings with the score, and close; TensorBoard has no status for failed runs."""
        if result.get("miou") is not None:
            score = {"miou": result["miou"]}
            self._writer.add_hparams(
                self._settings, score, run_name=".", global_step=result["steps"]
            )
        self._writer.close()


class Mlflow:
    """The MLflow run tagged with the id of this recipe and folder; a resumed run continues it."""

    def on_start(self, config: Config, step: int) -> None:
        """Start the run, or continue it."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        # MLflow defaults to a database, which mlflow-skinny cannot use; 3.x requires opting in to files.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        files = (Path(config.run.root) / "mlruns").resolve().as_uri()
        store = os.environ.get("MLFLOW_TRACKING_URI") or files
        self._client: Any = mlflow.MlflowClient(store)
        project, own = config.track.project or _PROJECT, run_id(config, config.run_dir)
        known = self._client.get_experiment_by_name(project)
        experiment = (
            known.experiment_id if known else self._client.create_experiment(project)
        )
        query = f"tags.`{_MLFLOW_TAG}` = '{own}'"
        if step and (earlier := self._client.search_runs([experiment], query)):
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {_MLFLOW_TAG: own}
        if config.track.group:
            tags["mlflow.parentRunId"] = self._parent(experiment, config.track.group)
        made = self._client.create_run(experiment, run_name=config.run.name, tags=tags)
        self._id = made.info.run_id
        params = [
            entities.Param(key, str(value)[:_MLFLOW_VALUE])
            for key, value in recipe(config).items()
        ]
        self._client.log_batch(self._id, params=params)

    def on_metrics(self, step: int, metrics: Figures) -> None:
        """Log the figures."""
        now = int(1000 * time.time())
        entries = [
            # MLflow accepts no other characters.
            self._entities.Metric(re.sub(r"[^\w\-. /]", "_", name), value, now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=entries)

    def on_validation(self, step: int, scores: Values, pictures: Pictures) -> None:
        """Log each picture with its masks side by side."""
        for name, _, panels in _side_by_side(scores, pictures):
            self._client.log_image(self._id, panels, f"step_{step:06}/{name}.png")

    def on_end(self, result: Values) -> None:
        """Log the files, and end the run."""
        for path in result.get("files", ()):
            if path.is_dir():
                self._client.log_artifacts(self._id, str(path), path.name)
            else:
                self._client.log_artifact(self._id, str(path))
        status = "FAILED" if result["exit_code"] else "FINISHED"
        self._client.set_terminated(self._id, status)

    def _parent(self, experiment: str, group: str) -> str:
        """Id of the parent run of a group in MLflow: the earliest one, if several jobs create it at once."""
        name = group.replace("'", "_")  # queries cannot escape quotes
        query = [experiment], f"tags.`{_MLFLOW_GROUP}` = '{name}'"
        if not self._client.search_runs(*query):
            made = self._client.create_run(
                experiment, run_name=group, tags={_MLFLOW_GROUP: name}
            )
            self._client.set_terminated(made.info.run_id)
        found = self._client.search_runs(*query, order_by=["attributes.start_time ASC"])
        return str(found[0].info.run_id)


def _side_by_side(scores: Values, pictures: Pictures) -> Iterator[tuple[str, str, Any]]:
    """A name, the same at each validation, a caption, and image, target, prediction and errors side by side."""
    for place, picture in enumerate(pictures):
        panels = picture.panels(scores["palette"])
        name = f"worst_{place}" if place else "first_image"
        caption = f"{picture.name}: mIoU {picture.miou:.3f}"
        yield name, caption, np.hstack([*panels.values()])


class Prometheus:
    """Gauges of this process for a Prometheus server: over HTTP on this machine, or in a text file.

    `step` and `time` are those of the last figures, so they reveal a stalled rank, also in a text file.
    """

    every_rank = True

    def on_start(self, config: Config, step: int) -> None:
        """Serve on 127.0.0.1 at port track.metrics plus the local rank, or write into the folder that it names."""
        import prometheus_client

        self._package: Any = prometheus_client
        self._registry: Any = prometheus_client.CollectorRegistry()
        self._gauges: Values = {}
        self._rank = environment.rank()
        self._labels = {"run": config.run.name, "rank": str(self._rank)}
        folder, place = config.run_dir, config.track.metrics
        self._files = {
            "checkpoint": folder / "last.pt",
            "ledger": ledger_path(folder, self._rank),
        }
        self._server: Any = None
        self._text: Path | None = None
        if place.isdigit():
            port = int(place) + environment.local_rank()
            self._server, _ = prometheus_client.start_http_server(
                port, "127.0.0.1", self._registry
            )
        else:
            name = config.run.name.replace("/", "_")
            self._text = Path(place) / f"segpipe_{name}_{self._rank}.prom"
        self._set("world_size", environment.world_size() or 1)
        self._set("restarts", sum(environment.job_attempt()[1]))
        self._set("resumed_step", step)
        self.on_metrics(step, {})

    def on_metrics(self, step: int, metrics: Figures) -> None:
        """Show the figures; where there is one per rank, only this rank's."""
        for name, value in metrics.items():
            kind, figure, *rest = name.split("/")
            if kind != "memory":
                self._set(f"{kind}_{figure}", value, "/".join(rest))
            elif rest == [str(self._rank)]:
                self._set(f"memory_{figure}", value)
        self._set("step", step)
        self._publish()

    def on_end(self, result: Values) -> None:
        """Keep the text file of a failed run, with its exit code; delete that of a successful run."""
        self._set("exit_code", result["exit_code"])
        if self._server:
            self._server.shutdown()
        if self._text and result["exit_code"]:
            self._publish()
        elif self._text:
            self._text.unlink(missing_ok=True)

    def _set(self, name: str, value: float, of: str = "") -> None:
        if name not in self._gauges:
            self._gauges[name] = self._package.Gauge(
                f"segpipe_{re.sub(r'[^a-zA-Z0-9]', '_', name)}",
                "See docs/monitoring.md",
                (*self._labels, "of"),
                registry=self._registry,
            )
        self._gauges[name].labels(**self._labels, of=of).set(value)

    def _publish(self) -> None:
        self._set("time", time.time())
        for name, path in self._files.items():
            with contextlib.suppress(OSError):
                found = path.stat()
                self._set("file_bytes", found.st_size, name)
                self._set("file_time", found.st_mtime, name)
        if self._text:
            self._package.write_to_textfile(str(self._text), self._registry)


# track.name -> name of its package for pip, and its class
TRACKERS: dict[str, tuple[str, Tracked]] = {
    "wandb": ("wandb", Wandb),
    "tensorboard": ("tensorboard", Tensorboard),
    "mlflow": ("mlflow-skinny", Mlflow),
    "prometheus": ("prometheus-client", Prometheus),
}
