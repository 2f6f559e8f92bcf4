"""Configuration: frozen dataclasses to and from TOML, and every check of a value; no torch.

A ``Config`` that exists is valid wherever it came from: a recipe, the command line or Python.
"""

from .documents import differing_fields as differing_fields
from .documents import fields_of as fields_of
from .documents import from_dict as from_dict
from .documents import from_toml as from_toml
from .documents import list_fields as list_fields
from .documents import load_recipe as load_recipe
from .documents import override as override
from .documents import recipes as recipes
from .documents import to_dict as to_dict
from .documents import to_toml as to_toml
from .methods import METHODS as METHODS
from .methods import ObjectiveSettings as ObjectiveSettings
from .rules import Section as Section
from .sections import OPTIONAL as OPTIONAL
from .sections import SECTIONS as SECTIONS
from .sections import Config as Config
from .sections import DataSettings as DataSettings
from .sections import DivergenceSettings as DivergenceSettings
from .sections import EncoderSettings as EncoderSettings
from .sections import OptimiserSettings as OptimiserSettings
from .sections import RotationSettings as RotationSettings
from .sections import TeacherSettings as TeacherSettings
from .sections import TrainingSettings as TrainingSettings
from .sections import ViewSettings as ViewSettings
from .sections import WeakViewSettings as WeakViewSettings
