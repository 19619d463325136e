"""segpipe trains real-time semantic segmentation so that the same run gives the same bits."""

__version__ = "0.1.0"

IGNORE_INDEX = 255  # class id in a target (uint8) that neither loss nor metric counts
