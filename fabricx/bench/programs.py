"""Programs that are measured beside the engine: a line to them, a line back, each within a deadline."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

from ..errors import ProviderError, TransferTimeout
from .harness import STEP


class Program:
    """A program that reads commands as lines and answers each with ``ok NUMBER`` or ``error WORDS``."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name = os.path.basename(command[0])
        self._p = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, **(env or {})}
        )
        self._rest = b""

    def say(self, line: str) -> None:
        """Gives a command; the answer is read by `words` or `number`."""
        assert self._p.stdin is not None
        self._p.stdin.write(line.encode() + b"\n")

    def words(self, first: str = "ok", timeout: float = STEP) -> list[str]:
        """What comes after `first` in the next line that starts with it. Other lines are the program's own chatter.

        Raises
        ------
        ProviderError
            with the program's words, when it says "error" or ends.
        TransferTimeout
        """
        end = time.monotonic() + timeout
        while True:
            line = self._line(end).split()
            if line and line[0] == first:
                return line[1:]
            if line and line[0] == "error":
                raise ProviderError(f"{self.name}: {' '.join(line[1:])}")

    def number(self, line: str) -> float:
        """Gives a command that is answered by a number."""
        self.say(line)
        return float(self.words()[0])

    def _line(self, end: float) -> str:
        assert self._p.stdout is not None
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._p.stdout], [], [], left)[0]:
                raise TransferTimeout(f"{self.name} did not answer")
            data = os.read(self._p.stdout.fileno(), 65536)
            if not data:
                raise ProviderError(f"{self.name} ended with code {self._p.wait(10)}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")

    def close(self) -> None:
        """Ends the program: a word, then force."""
        for pipe in (self._p.stdin, self._p.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._p.wait(3.0)
        except subprocess.TimeoutExpired:
            self._p.kill()
            self._p.wait(3.0)
