from types import ModuleType
from typing import Any

from segpipe.cli.api import RunResult as RunResult
from segpipe.cli.api import compare as compare
from segpipe.cli.api import configuration as configuration
from segpipe.cli.api import evaluate as evaluate
from segpipe.cli.api import export as export
from segpipe.cli.api import load as load
from segpipe.cli.api import train as train

__version__: str
IGNORE_INDEX: int

class CallableRoom(ModuleType):
    def __call__(self, *given: Any, **named: Any) -> Any: ...
