"""The guide's commands exist, with the options that it shows."""

import re
import shlex
from pathlib import Path

from deepbregman.cli import VERBS

from .conftest import Command

GUIDE = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()


def test_every_command_has_the_options_that_are_shown(command: Command) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).splitlines()
    assert len(lines) > 6
    for line in lines:
        program, verb, *words = shlex.split(line)
        assert program == "deepbregman"
        assert verb in VERBS
        recipe = words[:1] if verb == "pretrain" else []
        code, out, _ = command(verb, *recipe, "--help")
        assert code == 0
        for option in (word for word in words if word.startswith("--")):
            assert option in out, line
    for verb in ("explore", "duplicates", "cluster", "label", "export"):
        assert any(f"deepbregman {verb} " in line for line in lines)
