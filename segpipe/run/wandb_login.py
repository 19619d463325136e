"""Whether wandb has a login, found without a connection."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from segpipe.errors import ConfigError

if TYPE_CHECKING:
    from segpipe.settings.config import Config

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
