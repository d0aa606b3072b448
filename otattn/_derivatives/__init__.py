"""Derivatives of functions of the caller: given, by the library they are written in, or numerical with a stated error."""

from otattn._derivatives.derivative import Derivative, checked
from otattn._derivatives.library import Library, library_of

__all__ = ["Derivative", "Library", "checked", "library_of"]
