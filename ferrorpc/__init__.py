"""ferrorpc: several processes train one model.

    import ferrorpc

    with ferrorpc.init_process_group() as group:
        total = group.all_reduce(x)

This file is the public API: a table of names and the modules that define them. A name is imported on first use, so that
`import ferrorpc` takes next to no time and imports no framework.
"""

from __future__ import annotations

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrorpc import (
        errors as errors,
        hooks as hooks,
        rules as rules,
        schedules as schedules,
        testing as testing,
        torch as torch,
    )
    from ferrorpc.backends.base import Backend as Backend, Capabilities as Capabilities
    from ferrorpc.backends.grpc import GrpcBackend as GrpcBackend
    from ferrorpc.backends.simulated import SimulatedBackend as SimulatedBackend
    from ferrorpc.bootstrap.process_group import init_process_group as init_process_group
    from ferrorpc.ddp.batch_norm import batch_norm as batch_norm, batch_norm_gradient as batch_norm_gradient
    from ferrorpc.ddp.module import DistributedDataParallel as DistributedDataParallel
    from ferrorpc.ddp.parameter import Parameter as Parameter
    from ferrorpc.ddp.synchroniser import GradientSynchronizer as GradientSynchronizer
    from ferrorpc.ddp.zero import ZeroOptimizer as ZeroOptimizer
    from ferrorpc.errors import (
        AuthenticationError as AuthenticationError,
        BackendUnavailableError as BackendUnavailableError,
        BarrierTimeoutError as BarrierTimeoutError,
        CodecError as CodecError,
        CollectiveMismatchError as CollectiveMismatchError,
        CollectiveTimeoutError as CollectiveTimeoutError,
        ConfigError as ConfigError,
        CoordinatorUnavailableError as CoordinatorUnavailableError,
        ErrorCode as ErrorCode,
        FerroError as FerroError,
        GroupAbortedError as GroupAbortedError,
        GroupClosedError as GroupClosedError,
        InvalidRankError as InvalidRankError,
        InvalidWorldSizeError as InvalidWorldSizeError,
        LimitExceededError as LimitExceededError,
        MessageTooLargeError as MessageTooLargeError,
        NcclError as NcclError,
        PeerLostError as PeerLostError,
        PermissionDeniedError as PermissionDeniedError,
        RendezvousTimeoutError as RendezvousTimeoutError,
        SelfSendError as SelfSendError,
        StaleGenerationError as StaleGenerationError,
        StoreTimeoutError as StoreTimeoutError,
        TensorMismatchError as TensorMismatchError,
        UsageError as UsageError,
        VersionMismatchError as VersionMismatchError,
    )
    from ferrorpc.group import ProcessGroup as ProcessGroup
    from ferrorpc.mesh import Mesh as Mesh
    from ferrorpc.pipeline.runtime import Pipeline as Pipeline
    from ferrorpc.types import DType as DType, ReduceOp as ReduceOp, TensorSpec as TensorSpec
    from ferrorpc.work import Work as Work

_SUBMODULES = ("errors", "hooks", "rules", "schedules", "testing")
_OPTIONAL_SUBMODULES = ("torch",)  # not in __all__, so that `from ferrorpc import *` needs no PyTorch
_MODULE_OF = {
    "init_process_group": "ferrorpc.bootstrap.process_group",
    "ProcessGroup": "ferrorpc.group",
    "Work": "ferrorpc.work",
    "DType": "ferrorpc.types",
    "ReduceOp": "ferrorpc.types",
    "TensorSpec": "ferrorpc.types",
    "Backend": "ferrorpc.backends.base",
    "Capabilities": "ferrorpc.backends.base",
    "GrpcBackend": "ferrorpc.backends.grpc",
    "SimulatedBackend": "ferrorpc.backends.simulated",
    "DistributedDataParallel": "ferrorpc.ddp.module",
    "GradientSynchronizer": "ferrorpc.ddp.synchroniser",
    "Parameter": "ferrorpc.ddp.parameter",
    "ZeroOptimizer": "ferrorpc.ddp.zero",
    "batch_norm": "ferrorpc.ddp.batch_norm",
    "batch_norm_gradient": "ferrorpc.ddp.batch_norm",
    "Mesh": "ferrorpc.mesh",
    "Pipeline": "ferrorpc.pipeline.runtime",
    "ErrorCode": "ferrorpc.errors",
    "FerroError": "ferrorpc.errors",
    "ConfigError": "ferrorpc.errors",
    "UsageError": "ferrorpc.errors",
    "InvalidRankError": "ferrorpc.errors",
    "InvalidWorldSizeError": "ferrorpc.errors",
    "SelfSendError": "ferrorpc.errors",
    "TensorMismatchError": "ferrorpc.errors",
    "GroupClosedError": "ferrorpc.errors",
    "RendezvousTimeoutError": "ferrorpc.errors",
    "BarrierTimeoutError": "ferrorpc.errors",
    "StoreTimeoutError": "ferrorpc.errors",
    "CollectiveTimeoutError": "ferrorpc.errors",
    "CoordinatorUnavailableError": "ferrorpc.errors",
    "StaleGenerationError": "ferrorpc.errors",
    "PeerLostError": "ferrorpc.errors",
    "CollectiveMismatchError": "ferrorpc.errors",
    "GroupAbortedError": "ferrorpc.errors",
    "LimitExceededError": "ferrorpc.errors",
    "MessageTooLargeError": "ferrorpc.errors",
    "CodecError": "ferrorpc.errors",
    "AuthenticationError": "ferrorpc.errors",
    "PermissionDeniedError": "ferrorpc.errors",
    "VersionMismatchError": "ferrorpc.errors",
    "BackendUnavailableError": "ferrorpc.errors",
    "NcclError": "ferrorpc.errors",
}

__version__: str
"""Version of the installed distribution; "0+unknown" if ferrorpc runs from a source folder."""

__all__ = [
    "__version__",
    "errors",
    "hooks",
    "rules",
    "schedules",
    "testing",
    "init_process_group",
    "ProcessGroup",
    "Work",
    "DType",
    "ReduceOp",
    "TensorSpec",
    "Backend",
    "Capabilities",
    "GrpcBackend",
    "SimulatedBackend",
    "DistributedDataParallel",
    "GradientSynchronizer",
    "Parameter",
    "ZeroOptimizer",
    "batch_norm",
    "batch_norm_gradient",
    "Mesh",
    "Pipeline",
    "ErrorCode",
    "FerroError",
    "ConfigError",
    "UsageError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "SelfSendError",
    "TensorMismatchError",
    "GroupClosedError",
    "RendezvousTimeoutError",
    "BarrierTimeoutError",
    "StoreTimeoutError",
    "CollectiveTimeoutError",
    "CoordinatorUnavailableError",
    "StaleGenerationError",
    "PeerLostError",
    "CollectiveMismatchError",
    "GroupAbortedError",
    "LimitExceededError",
    "MessageTooLargeError",
    "CodecError",
    "AuthenticationError",
    "PermissionDeniedError",
    "VersionMismatchError",
    "BackendUnavailableError",
    "NcclError",
]


if not TYPE_CHECKING:  # a checker would let any name pass

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            value = getattr(_import_module(_MODULE_OF[name]), name)
        elif name in _SUBMODULES:
            value = _import_module(f"ferrorpc.{name}")
        elif name in _OPTIONAL_SUBMODULES:
            try:
                value = _import_module(f"ferrorpc.{name}")
            except ModuleNotFoundError as error:  # hasattr() and tools that inspect modules expect nothing else
                raise AttributeError(str(error)) from error
        elif name == "__version__":
            value = _import_module("ferrorpc.versions").own_version()
        else:
            raise AttributeError(f"module 'ferrorpc' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _prepare_grpc() -> None:
    """Sets the environment variables that gRPC reads when it is imported.

    gRPC's fork handlers are switched off: they kill forked children, such as those of a data loader. Its log level is set to
    ERROR unless the user has set one: it logs every connection that ends ("Got goaway"), which ferrorpc handles and explains.
    """
    variable = "GRPC_ENABLE_FORK_SUPPORT"
    if "grpc" in _sys.modules and _os.environ.get(variable) != "0":
        _import_module("warnings").warn(
            "grpc was imported before ferrorpc, so its fork support is on, and forked children may be killed by it: "
            f"import ferrorpc first, or set {variable}=0",
            RuntimeWarning,
            stacklevel=3,
        )
    _os.environ[variable] = "0"
    _os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


_prepare_grpc()
