"""The conformance suite: what must hold on every fabric, whatever its NICs, reach and order of delivery. The tests are those of
tests/engine; here they run over the variants of tests/engine/conftest.py."""

from test_imm import *  # noqa: F403
from test_refusals import *  # noqa: F403
from test_transfers import *  # noqa: F403
