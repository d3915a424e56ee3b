"""Python imports this by itself where its folder is on the path: the process gets a SIGTERM at the import of one module.

STOP_AT_IMPORT names it. So a test stops a real process at an exact moment, however busy the machine is.
"""

import os
import signal
import sys


class _Stopper:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == os.environ.get("STOP_AT_IMPORT"):
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGTERM)


sys.meta_path.insert(0, _Stopper())  # type: ignore[arg-type]
