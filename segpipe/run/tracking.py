"""Metrics of a run: metrics.jsonl always, Weights & Biases on request. Only rank 0 writes.

metrics.jsonl is the record that other code reads; wandb mirrors it. If wandb is unreachable or crashes, that costs one
warning and never a step of training.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import json
import netrc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from segpipe.errors import ConfigError
from segpipe.files import plain, write_atomically
from segpipe.settings.config import Config, recipe, to_mapping

FILE_NAME = "metrics.jsonl"
_RESERVED = frozenset({"step", "kind", "time_s"})
# One service under two names: wandb 0.31 moved its default host and still accepts a login for the former one.
_WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def check_tracking(config: Config) -> None:
    """Raise ConfigError if track=wandb, but wandb is not installed, or online without a login.

    Looks where wandb looks for a key (WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, netrc, its settings files) and opens no
    connection, so it can run before the first step. An invalid key shows only online.
    """
    if config.track.name != "wandb":
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("track.name = wandb, but wandb is not installed. Run pip install wandb, or set track=none.")
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


def run_id(config: Config, run_dir: Path) -> str:
    """wandb's id of the run, 16 hex digits: a function of the folder's name and the recipe only.

    Settings that may change on resume (`FREE_KEYS`) do not enter, so that a resumed run continues its curve.
    """
    text = json.dumps([run_dir.name, recipe(config)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Entries of a metrics.jsonl, oldest first; empty if there is no file. Lines damaged by a crash are skipped."""
    return list(_entries(path))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:  # after the last newline: nothing, or a torn line
        try:
            entry = json.loads(line)
        except ValueError:  # a block lost in a power failure
            continue
        if isinstance(entry, dict) and entry.keys() >= _RESERVED:
            yield entry


class Tracker:
    """Appends to metrics.jsonl and mirrors to wandb; created by `open_tracker`."""

    def __init__(
        self, path: Path | None, mirror: _Wandb | None = None, *, kept: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._file = path.open("a", encoding="utf-8") if path else None
        self._kept = {(entry["step"], entry["kind"]) for entry in kept}
        earlier_s = kept[-1]["time_s"] if kept else 0.0
        self._mirror = mirror
        self._start = time.monotonic() - earlier_s

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line {"step", "kind", "time_s", **values}; NaN and infinities become null.

        A line that an earlier session of the run has written is not written again. time_s is the training time of all
        sessions, without the pauses between them. The line is flushed to the operating system, so it survives a crash
        of the process.
        """
        clash = _RESERVED & values.keys()
        if clash:
            raise ValueError(f"log() sets {', '.join(sorted(clash))} itself; leave it out of the values.")
        if self._file is None or (step, kind) in self._kept:
            return
        found = plain(values)
        elapsed = round(time.monotonic() - self._start, 3)
        entry = {"step": step, "kind": kind, "time_s": elapsed, **found}
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()
        if self._mirror:
            self._mirror.log(step, {f"{kind}/{name}": value for name, value in _scalars(found)})

    def close(self, exit_code: int = 0) -> None:
        """Close the file and finish the wandb run, failed if `exit_code` is not 0. A second call does nothing."""
        if self._file:
            self._file.close()
        if self._mirror:
            self._mirror.close(exit_code)
        self._file = self._mirror = None


def open_tracker(config: Config, run_dir: Path, resume_step: int | None, *, rank: int) -> Tracker:
    """Tracker of this process; on ranks above 0 it does nothing.

    resume_step=None starts an empty metrics.jsonl. A number keeps the lines up to that step; later ones will be written
    again.
    """
    if rank != 0:
        return Tracker(None)
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    kept = [] if resume_step is None else [entry for entry in _entries(path) if entry["step"] <= resume_step]
    write_atomically(path, "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in kept).encode())
    mirror = _Wandb(config, run_dir, resume=resume_step is not None) if config.track.name == "wandb" else None
    return Tracker(path, mirror, kept=kept)


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values. A list becomes one curve for each index (rank), named NAME/INDEX."""
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/{index}", item) for index, item in enumerate(value))
        else:
            yield name, value


class _Wandb:
    """The wandb run that mirrors metrics.jsonl. Its first exception prints a warning and ends the mirror."""

    def __init__(self, config: Config, run_dir: Path, *, resume: bool) -> None:
        self._run: Any = None
        try:
            self._run = self._start(config, run_dir, resume)
        except Exception as error:
            self._give_up(error)

    @staticmethod
    def _start(config: Config, run_dir: Path, resume: bool) -> Any:
        if config.track.mode == "offline":
            # wandb 0.31 sends a report of its start over the network even offline, unless this is set.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # takes a second and starts a service process

        return wandb.init(
            project=config.track.project,
            entity=config.track.entity or None,
            name=config.run.name,
            id=run_id(config, run_dir),
            resume="allow" if resume else None,  # None replaces an earlier run with this id
            dir=str(run_dir),
            mode="offline" if config.track.mode == "offline" else "online",
            config=to_mapping(config),
            save_code=False,
            # Leave our output alone and never prompt.
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({name: value for name, value in values.items() if value is not None}, step=step)
        except Exception as error:
            self._give_up(error)

    def close(self, exit_code: int) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        Console(stderr=True).print(
            f"wandb stopped: {type(error).__name__}: {error}. Training continues; {FILE_NAME} has every value.",
            style="yellow",
            markup=False,
            highlight=False,
        )
