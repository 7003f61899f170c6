"""asv suite of fabricx: `cd bench && asv run --python=same --quick`.

Two engines in one process, so that a figure is one number without a second process to wait for; `fabricx bench p2p` has the
figures between processes, with references beside them.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("fabricx") is None:  # a checkout that was built in place
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
