"""``python -m rankwire``: the command line."""

from rankwire.cli import main

main()
