"""Torch: modules as attention maps of the library, and a local Lipschitz constant that can be differentiated (extra ``torch``).

Reading this package does not import torch; its functions do.
"""

from otattn.torch.constant import LocalConstant, local_lipschitz
from otattn.torch.modules import from_torch

__all__ = ["LocalConstant", "from_torch", "local_lipschitz"]
