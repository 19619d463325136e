"""segpipe trains real-time semantic segmentation so that the same run gives the same bits."""

__version__ = "0.1.0"
