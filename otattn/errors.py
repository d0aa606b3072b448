"""The exceptions of otattn: one base class, one child a kind of failure."""

__all__ = [
    "CertificateError",
    "ConvergenceError",
    "MemoryBudgetError",
    "NoJacobianError",
    "NotGaussianPreservingError",
    "OtattnError",
    "StoreError",
    "StoreWarning",
    "WorkerError",
]


class OtattnError(Exception):
    """Base class of every error that otattn raises on its own account (bad arguments stay ValueError or TypeError)."""


class ConvergenceError(OtattnError, RuntimeError):
    """An iteration stopped before its tolerance; the message gives what was reached."""


class CertificateError(OtattnError, RuntimeError):
    """A bound could not be certified: the dual point could not be repaired to a feasible one."""


class NotGaussianPreservingError(OtattnError, TypeError):
    """The attention variant does not map Gaussian measures to Gaussian measures."""


class NoJacobianError(OtattnError, NotImplementedError):
    """The derivative that is needed is not known of this map."""


class MemoryBudgetError(OtattnError, MemoryError):
    """The exact computation would allocate more memory than allowed; raised before anything is allocated."""


class StoreError(OtattnError, OSError):
    """A results store is locked, damaged or not ours."""


class StoreWarning(UserWarning):
    """Records of a results store were torn, damaged or foreign: they are named, set aside and computed again."""


class WorkerError(OtattnError, RuntimeError):
    """A worker process ended while it worked; what was finished before is kept where there is a store."""
