"""``python -m deepbregman`` is the command line."""

from .cli import main

main()
