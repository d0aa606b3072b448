"""Test workers share the cores: one BLAS thread each."""

import numpy  # noqa: F401  (numpy and scipy bring a BLAS each, and only what is loaded can be limited)
import scipy.linalg  # noqa: F401
from threadpoolctl import threadpool_limits

threadpool_limits(limits=1, user_api="blas")
