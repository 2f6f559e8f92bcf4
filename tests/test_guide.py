"""The guide goes through the verbs that a user of photos needs; test_docs.py checks the options."""

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()


@pytest.mark.parametrize(
    "verb", ["pretrain", "explore", "duplicates", "cluster", "label", "export"]
)
def test_a_command_is_shown(verb):
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    assert f"deepbregman {verb} " in "".join(blocks)
