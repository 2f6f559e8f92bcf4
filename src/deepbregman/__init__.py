"""Deep Bregman divergences for contrastive learning of visual representations.

The public names are those of ``__init__.pyi``, each loaded when it is first used: ``deepbregman
--help`` needs no torch, and a training loop that takes one loss needs no laboratory around it.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
