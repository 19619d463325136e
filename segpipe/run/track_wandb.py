"""Weights & Biases: figures, a table of classes, pictures of the report, the exported files as an artifact."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from segpipe.errors import ConfigError
from segpipe.run.tracked import RunEnd, run_id
from segpipe.settings.config import Config, to_mapping

# One service under two names: wandb 0.31 moved its default host and still accepts a login for the former one.
_WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


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
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or "").netloc
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
    paths = (Path(name).expanduser() for name in ([chosen] if chosen else ["~/.netrc", "~/_netrc"]))
    path = next((path for path in paths if path.is_file()), None)
    try:
        logins = netrc.netrc(path) if path else None
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return False
    entries = [logins.authenticators(host) for host in hosts] if logins else []
    return any(entry and entry[2] for entry in entries)


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
            resume=None if step is None else "allow",  # None replaces an earlier run with this id
            dir=str(run_dir),
            mode="offline" if config.track.mode == "offline" else "online",
            config=to_mapping(config),
            save_code=False,
            # Leave our output alone and never prompt.
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step."""
        self._run.log(dict(values), step=step)

    def finish(self, end: RunEnd) -> None:
        """Results of the whole run."""
        table = self._wandb.Table(columns=["class", "IoU"], data=[list(row) for row in end.iou.items()])
        pictures = [self._wandb.Image(image, caption=caption) for caption, image in end.pictures]
        self._run.log({"classes": table, **({"images": pictures} if pictures else {})}, step=end.step)
        self._run.summary.update({"miou": end.miou})
        if end.files:
            artifact = self._wandb.Artifact(f"{self._run.id}-export", type="model", metadata={"miou": end.miou})
            for path in end.files:
                artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
            self._run.log_artifact(artifact)

    def close(self, exit_code: int) -> None:
        """Finish the run, failed if `exit_code` is not 0."""
        self._run.finish(exit_code=exit_code)
