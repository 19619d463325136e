"""What a run writes down while it runs: metrics.jsonl always, Weights & Biases when asked.

metrics.jsonl is the record that everything else reads; wandb is a mirror of it. So an unreachable, crashed or absent
wandb costs one warning and never a step of training. Only rank 0 writes.
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
from segpipe.files import plain
from segpipe.settings.config import Config, recipe, to_mapping

FILE_NAME = "metrics.jsonl"
_RESERVED = frozenset({"step", "kind", "time_s"})
# One service under two names: wandb 0.31 moved its default and still reads the login of the former.
_WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def check_tracking(config: Config) -> None:
    """Raise ConfigError when wandb was asked for but is not installed, or online without a login.

    Looks where wandb itself looks for a key (WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, netrc, its settings files), asks
    nobody and opens no connection, so it belongs before the first step. Whether the key is valid shows only online.
    """
    if config.track.name != "wandb":
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("track.name = wandb, but wandb is not installed. Run pip install wandb, or set track=none.")
    if config.track.mode == "online" and not _has_login():
        raise ConfigError(
            "track.mode = online, but no wandb login was found. Run `wandb login` once, or set WANDB_API_KEY, "
            "or record without an account by track.mode=offline."
        )


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    stored = _wandb_settings()
    own_server = urlsplit(os.environ.get("WANDB_BASE_URL") or stored.get("base_url") or "").netloc
    hosts = _WANDB_HOSTS if own_server in ("", *_WANDB_HOSTS) else (own_server,)
    return bool(stored.get("api_key")) or _netrc_knows(hosts)


def _wandb_settings() -> dict[str, str]:
    """The settings that `wandb login` and `wandb init` leave in files; the folder's own win."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([folder / "settings", Path("wandb") / "settings"])
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _netrc_knows(hosts: tuple[str, ...]) -> bool:
    chosen = os.environ.get("NETRC")
    paths = [Path(chosen)] if chosen else [Path("~/.netrc"), Path("~/_netrc")]
    path = next((found for found in (path.expanduser() for path in paths) if found.is_file()), None)
    try:
        logins = netrc.netrc(path) if path else None
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return False
    entries = [logins.authenticators(host) for host in hosts] if logins else []
    return any(entry and entry[2] for entry in entries)


def run_id(config: Config, run_dir: Path) -> str:
    """16 hex digits by which wandb knows the run: a function of the folder's name and the recipe only.

    What may differ when the same run goes on, `FREE_KEYS`, does not enter, so a resumed run continues its curve instead
    of starting another.
    """
    text = json.dumps([run_dir.name, recipe(config)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl as dictionaries, oldest first; empty when there is no file.

    A line that a crash left torn is skipped.
    """
    return list(_whole_lines(path))


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is empty or torn
        try:
            entry = json.loads(line)
        except ValueError:  # a block lost in a power failure
            continue
        if isinstance(entry, dict) and entry.keys() >= _RESERVED:
            yield entry


class Tracker:
    """Appends what is logged to metrics.jsonl, and mirrors it; made by `open_tracker`."""

    def __init__(
        self, path: Path | None, mirror: _Wandb | None = None, *, kept: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._file = path.open("a", encoding="utf-8") if path else None
        self._kept = {(entry["step"], entry["kind"]) for entry in kept}
        earlier_s = kept[-1]["time_s"] if kept else 0.0
        self._mirror = mirror
        self._start = time.monotonic() - earlier_s

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line {"step", "kind", "time_s", **values}; NaN and infinities become null, as JSON has neither.

        A line that an earlier session of the run has written is not written again.
        time_s is the time since the run began, without the pauses between a crash and its resume. The line is handed to
        the operating system before this returns, so it survives the process.
        """
        clash = _RESERVED & values.keys()
        if clash:
            raise ValueError(f"log() was given {', '.join(sorted(clash))} among its values; the line has its own.")
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
        """Finish; wandb shows the run as failed when `exit_code` is not 0. Closing twice does nothing."""
        if self._file:
            self._file.close()
        if self._mirror:
            self._mirror.close(exit_code)
        self._file = self._mirror = None


def open_tracker(config: Config, run_dir: Path, resume_step: int | None, *, rank: int) -> Tracker:
    """Tracker of this process; on any rank but 0 it writes nothing and starts nothing.

    resume_step=None starts an empty metrics.jsonl. A number keeps the lines up to that step, drops the ones beyond it,
    which will be written again, and cuts a torn last line; the file is replaced in one move.
    """
    if rank != 0:
        return Tracker(None)
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    kept = [] if resume_step is None else [entry for entry in _whole_lines(path) if entry["step"] <= resume_step]
    _rewrite(path, kept)
    mirror = _Wandb(config, run_dir, resume=resume_step is not None) if config.track.name == "wandb" else None
    return Tracker(path, mirror, kept=kept)


def _rewrite(path: Path, entries: list[dict[str, Any]]) -> None:
    draft = path.with_name(path.name + ".partial")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those of a list under its name and their place: a curve for each rank."""
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/{place}", item) for place, item in enumerate(value))
        else:
            yield name, value


class _Wandb:
    """The one wandb run of a training run. Whatever it raises is said once, and ends the mirror, not the training."""

    def __init__(self, config: Config, run_dir: Path, *, resume: bool) -> None:
        self._run: Any = None
        try:
            self._run = self._start(config, run_dir, resume)
        except Exception as error:
            self._give_up(error)

    @staticmethod
    def _start(config: Config, run_dir: Path, resume: bool) -> Any:
        if config.track.mode == "offline":
            # wandb 0.31 reports its own start over the network even when offline, unless told not to.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # a second and a service process: paid only by runs that use it

        return wandb.init(
            project=config.track.project,
            entity=config.track.entity or None,
            name=config.run.name,
            id=run_id(config, run_dir),
            resume="allow" if resume else None,  # None: a run that starts anew replaces the one of the same id
            dir=str(run_dir),
            mode="offline" if config.track.mode == "offline" else "online",
            config=to_mapping(config),
            save_code=False,
            # silent and console=off keep wandb's hands off our output; there is nobody to answer a prompt.
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
            f"wandb stopped: {type(error).__name__}: {error}. Training goes on; {FILE_NAME} holds every value.",
            style="yellow",
            markup=False,
            highlight=False,
        )
