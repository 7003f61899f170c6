"""``python -m fabricx``: the `fabricx` command."""

from .cli import main

main()
