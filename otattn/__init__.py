"""otattn: measure and certify how stable attention is in the geometry of optimal transport.

Tokens are a probability measure, attention moves it: ``F(mu) = (Gamma_mu)_# mu``. Build a measure, build an attention
map, compare measures, ask how much the map stretches.

>>> import numpy as np
>>> import otattn as oa
>>> attention = oa.SoftmaxAttention(A=-np.eye(2), V=np.eye(2))
>>> mu = oa.DiscreteMeasure([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
>>> oa.local_lipschitz(attention, mu)
LocalLipschitz(1.45354, p=2, particle=1.45354, splitting=0.844638, n=3)
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
