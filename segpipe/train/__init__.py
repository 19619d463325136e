"""Training: one update, the loop around it, and the state it changes."""

import sys

from segpipe import CallableRoom

sys.modules[__name__].__class__ = CallableRoom
