"""Losses as pure functions of (logits, target); `shard_loss` is what the engine calls."""

from segpipe.losses.pixelwise import class_weights
from segpipe.losses.total import shard_loss, valid_pixels

__all__ = ["class_weights", "shard_loss", "valid_pixels"]
