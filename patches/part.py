"""One patched module: its method replaced by a runner, made when the module first runs on a device.

Knows a module, the pool family it shares and the options of `patch`. Does not know which parts a
pipeline has (pipeline.py) nor how recording works (accel.runner).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from accel.backend import backend_for
from accel.memory import Pool
from accel.patches.caches import opened
from accel.patches.forward import PatchedMethod
from accel.patches.shims import shimmed
from accel.patches.sizes import bytes_from
from accel.patches.state import StateProbe
from accel.reporting import PartReport
from accel.runner import GraphRunner

Capture = Literal["auto", "always"]

SETTLED_CALLS = 3
"""Eager calls after which a part that recorded nothing is not going to, for now."""


_making_pools = threading.Lock()


@dataclass
class Options:
    """What `patch` was told, and the pools, one a device, that its parts share.

    Raises ValueError for a value that an option does not know.
    """

    capture: Capture = "auto"
    memory_limit: int | str | None = None
    text_encoder: bool = True
    vae: bool = True
    pools: dict[torch.device, Pool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capture not in ("auto", "always"):
            raise ValueError(f'capture={self.capture!r}: patch() knows capture="auto" and "always"')
        if self.memory_limit is not None:
            bytes_from(self.memory_limit)

    def same_as(self, other: Options) -> bool:
        """Whether `patch` was told the same."""
        ours, theirs = vars(self) | {"pools": None}, vars(other) | {"pools": None}
        return ours == theirs

    def pool(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Pool:
        """The pool of `device`, made at first use, by a module of that `dtype`."""
        with _making_pools:
            if device in self.pools:
                return self.pools[device]
            limit = None if self.memory_limit is None else bytes_from(self.memory_limit)
            return self.pools.setdefault(device, Pool(device, limit, dtype))


class Part:
    """A module's `method`, patched. `after` is run after each of its calls; `is_encoder` says that
    a pipeline takes hidden states from it and nothing else.

    >>> layer = nn.Linear(2, 2)
    >>> part = Part("layer", layer, "forward", Options())
    >>> layer.forward.__name__, layer(torch.zeros(1, 2)).shape
    ('forward', torch.Size([1, 2]))
    >>> part.take_off()
    >>> "forward" in vars(layer)
    False
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        method: str,
        options: Options,
        after: Callable[[], None] = lambda: None,
        is_encoder: bool = False,
    ) -> None:
        self.name, self.module, self.options = name, module, options
        self._method, self._after = method, after
        self.report = PartReport(name, type(module).__name__)
        self._probe = StateProbe(module)
        self._runner: GraphRunner | None = None
        self._first: tuple[dict[str, Any], str] | None = _first_parameter(module)
        self._install()
        self._unread_cache = _position_of_use_cache(self._patched, module) if is_encoder else None

    def _install(self) -> None:
        self._patched = PatchedMethod(self.module, self._method, self._call)
        self._patched.install()

    def stay_installed(self) -> None:
        """Puts the patch on again if someone's hook, older than it, took it away when removed."""
        if not self._patched.is_reachable():
            self._patched.retire()
            if self._runner is not None:
                self._runner.forget_graphs()
            self._runner = None
            self._install()

    @property
    def is_on(self) -> bool:
        """Whether calls of the module come by here."""
        return self._patched.is_reachable()

    @property
    def settled_without_gain(self) -> bool:
        """Whether it has had its first calls and records nothing."""
        return self.report.captures == 0 and self.report.eager_calls >= SETTLED_CALLS

    def take_off(self) -> None:
        """Restores the method and gives the recordings up."""
        self._patched.retire()
        if self._runner is not None:
            self._runner.forget_graphs()
        self._runner = None

    def _call(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        runner = self._runner_for(original)
        if runner is None:
            self.report.eager(self._probe.veto() or "the module is not on a CUDA device")
            result = original(*args, **kwargs)
            self._after()
            return result
        if self._unread_cache is not None and len(args) <= self._unread_cache:
            # A cache that nobody reads costs an upload a layer, and comes back as an opaque object.
            kwargs.setdefault("use_cache", False)
        args, kwargs = opened(args, kwargs)
        result = runner(*args, **kwargs)
        self._after()  # while the device works
        return result

    def _runner_for(self, original: Callable[..., Any]) -> GraphRunner | None:
        parameter = self._parameter()
        pool = None if parameter is None else self.options.pools.get(parameter.device)
        if pool is None:
            if parameter is None or backend_for(parameter.device) is None:
                return None
            pool = self.options.pool(parameter.device, parameter.dtype)
        if self._runner is None or self._runner.pool is not pool:
            self._runner = GraphRunner(
                shimmed(original, self.module),
                pool=pool,
                name=self.name,
                module=self.module,
                capture=self.options.capture,
                probe=self._probe,
                veto=self._probe.veto,
                remember=self._probe.remember,
            )
            self._runner.report = self.report
        return self._runner

    def device(self) -> torch.device | None:
        """Where the module's first parameter is; None if it has none."""
        parameter = self._parameter()
        return None if parameter is None else parameter.device

    def _parameter(self) -> torch.Tensor | None:
        owner, name = self._first or ({}, "")
        if owner.get(name) is None:
            self._first = _first_parameter(self.module)
            owner, name = self._first or ({}, "")
        return owner.get(name)


def _first_parameter(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Where the module's first parameter is kept."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                return child._parameters, name
    return None


def _position_of_use_cache(forward: Callable[..., Any], module: nn.Module) -> int | None:
    """Where a language model takes `use_cache`, None if it does not: a pipeline that uses one as a
    text encoder leaves that unset, and reads no cache. One that hands it on unnamed, to the
    language model in it, takes it after everything else."""
    parameters = inspect.signature(forward).parameters
    if "use_cache" in parameters:
        return list(parameters).index("use_cache")
    if all(x.kind is not inspect.Parameter.VAR_KEYWORD for x in parameters.values()):
        return None
    inner = (getattr(module, name, None) for name in ("model", "language_model"))
    models = [model for model in inner if isinstance(model, nn.Module)]
    takes = any(_position_of_use_cache(model.forward, model) is not None for model in models)
    return len(parameters) if takes else None
