"""Where pyverbs is found. Debian's package lies in the system Python's folder, which a virtual environment does not see; a
Python of the same minor version can load it from there, and nothing else is taken from that folder."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from types import ModuleType

from .. import errors

PLACES = ("/usr/lib/python3/dist-packages", "/usr/lib/python3/site-packages", "/usr/lib64/python3/site-packages")
INSTALL = "install it (Debian: apt-get install python3-pyverbs ibverbs-providers)"
MODULES = ("enums", "device", "pd", "cq", "srq", "qp", "mr", "addr", "wr", "pyverbs_error")


def import_pyverbs() -> dict[str, ModuleType]:
    """The modules of pyverbs by name.

    Raises
    ------
    FabricUnavailable
        saying what to install.
    """
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
            spec = importlib.machinery.PathFinder.find_spec("pyverbs", list(PLACES))
            if spec is None or spec.loader is None:
                raise errors.FabricUnavailable(f"the verbs fabric needs pyverbs; {INSTALL}")
            package = importlib.util.module_from_spec(spec)
            sys.modules["pyverbs"] = package
            spec.loader.exec_module(package)
        return {name: importlib.import_module("pyverbs." + name) for name in MODULES}
    except ImportError as e:
        have = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise errors.FabricUnavailable(f"pyverbs cannot be loaded by Python {have}: {e}; {INSTALL}") from e
    finally:
        # importing it calls logging.basicConfig(), which is the application's to do
        for h in [h for h in root.handlers if h not in before]:
            root.removeHandler(h)
        root.setLevel(level)
