"""The methods, and how a configuration becomes what is trained.

Each method is a file here with a subclass of :class:`Objective`, found by its name.
"""

from .build import build_run_encoder as build_run_encoder
from .build import build_step as build_step
from .build import build_untrained_encoder as build_untrained_encoder
from .build import build_views as build_views
from .divergence import DivergenceTerm as DivergenceTerm
from .objective import Gather as Gather
from .objective import Group as Group
from .objective import Objective as Objective
from .objective import Outputs as Outputs
from .objective import Samples as Samples
from .objective import ViewGroups as ViewGroups
from .own import OwnParts as OwnParts
from .own import OwnViews as OwnViews
from .step import Step as Step
from .step import StepOutputs as StepOutputs
from .step import gather_alone as gather_alone
