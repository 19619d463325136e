"""What a target holds: uint8 (H, W) of class ids, and one id that is no class."""

IGNORE_INDEX = 255  # of pixels that neither loss nor metric counts
