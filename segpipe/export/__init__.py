"""Exports a trained network to files that provably compute what it computes, or to nothing."""

import sys

from segpipe import CallableRoom

sys.modules[__name__].__class__ = CallableRoom
