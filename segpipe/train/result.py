"""What a run ends with: the content of result.json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from segpipe import __version__
from segpipe.data.samples import sequences
from segpipe.determinism import flags
from segpipe.ledger.digest import state_digest
from segpipe.ledger.reader import last_seals
from segpipe.settings.config import config_hash
from segpipe.train.scores import scores
from segpipe.train.start import weights_summary

if TYPE_CHECKING:
    from segpipe.train.training import Run
    from segpipe.train.validate import Validation


def result_of(run: Run, found: Validation, images_per_second: float, *, stopped_early: bool) -> dict[str, Any]:
    """Content of result.json. `miou` is that of the last averaged weights in fp32, not of the best checkpoint."""
    config, current = run.config, run.state
    where, seen = (sequences(samples, config.data.sequence) for samples in (run.val_samples, run.train_samples))
    return {
        "name": config.run.name,
        "images": len(run.val_samples),
        **scores(found, run.val_samples.classes.names, where, set(seen)),
        "best_miou": current.best_miou,
        "steps": current.step,
        "stopped_early": stopped_early,
        **_speed(run, images_per_second),
        "world_size": run.group.world_size,
        "shards": config.compute.shards,
        "global_batch": config.global_batch,
        "weights_digest": state_digest(current.model.state_dict()),
        "ema_digest": state_digest(current.ema.model.state_dict()),
        "config_hash": config_hash(config),
        "segpipe": __version__,
        "mode": config.compute.mode,
        "versions": run.fingerprint,
        "switches": flags.switches(),
        "ledger": last_seals(run.folder),
        **weights_summary(config),
    }


def _speed(run: Run, images_per_second: float) -> dict[str, float]:
    """How fast the updates were; if a resumed run had none left, the figures of the earlier result.json."""
    found = {"images_per_second": round(images_per_second, 3), "train_seconds": round(run.clock.seconds, 3)}
    path = run.folder / "result.json"
    if run.clock.updates or not path.is_file():
        return found
    try:
        earlier = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):  # altered by hand
        return found
    return {name: earlier.get(name, value) for name, value in found.items()}
