"""Types of parameters that several verbs share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

T = TypeVar("T")
PYTHON_ONLY = "a parameter that the command line does not offer"
PythonOnly = Annotated[T, PYTHON_ONLY]
"""Marks a parameter that only Python can pass, such as a module or an open data source.

The type may be a string, so that its module need not be imported: ``PythonOnly["nn.Module"]``.
"""
if TYPE_CHECKING:
    from deepbregman.runs import Run

    Accelerator = str  # programs choose by text of their own; pick_device checks it
    RunFolder: TypeAlias = Run | Path | str
else:
    Accelerator = Literal["auto", "cpu", "cuda", "mps"]
    RunFolder = Path
