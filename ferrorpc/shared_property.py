"""An attribute that is made at its first use and is then the same object for all threads."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self, TypeVar, overload

Value = TypeVar("Value")


class shared_property(cached_property[Value]):
    """As functools.cached_property, for what must exist only once, such as a lock, a latch or a pool of memory.

    From Python 3.12 on, each of several threads that read a cached_property for the first time at once may get an object of its
    own. Here, too, each may make one, but all get the first one that was kept.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = ...) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = ...) -> Value: ...
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        name: Any = self.attrname  # a string, once it is an attribute of a class
        return vars(instance).setdefault(name, self.func(instance))
