"""Bytes and labels to uint8 batches on the training device.

The public names are those of ``__init__.pyi``, each loaded when it is first used: ``check_source``
needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
