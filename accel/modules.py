"""Which modules a module's forward may call: those in it, and those that only Python knows of.

Knows modules, plain containers and what callables bring along. What of a module may change it does
not know (guard.py).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from accel.signature import opened

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch itself gives a module."""


def carried(x: Any) -> tuple[Any, ...]:
    """What a callable brings along beside its code: a bound method its object, a partial function
    its arguments, a function its closure, defaults and attributes; one of torch's, which may note
    there what it likes (the compiler does), what it was put around.

    >>> carried([].append), carried(functools.partial(max, 1)), carried(len)
    ((), (<built-in function max>, (1,), {}), ())
    """
    if isinstance(x, types.MethodType):
        return x.__self__, x.__func__
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if not isinstance(x, types.FunctionType):
        return ()
    if x.__globals__.get("__name__", "").partition(".")[0] == "torch":
        return tuple(x.__dict__[name] for name in ("__wrapped__",) if name in x.__dict__)
    inside = [cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType()]
    own = x.__dict__ if x.__dict__.keys() - {"__wrapped__"} else None
    return (*inside, *filter(None, (x.__defaults__, x.__kwdefaults__, own)))


def all_modules(module: nn.Module) -> list[nn.Module]:
    """`module` and those in it, also in plain lists and dicts among the attributes and behind
    functions that stand there, each once.

    >>> class Own(nn.Module):
    ...     pass
    >>> own = Own()
    >>> own.spare = [nn.ReLU()]
    >>> all_modules(own)
    [Own(), ReLU()]
    """
    found: dict[nn.Module, None] = {}
    ahead = [module]
    while ahead:
        news = [m for m in ahead.pop().modules() if m not in found]
        found.update(dict.fromkeys(news))
        for own in attributes_of_others(news):
            boxes = (x for name, x in list(own.items()) if name not in _OF_EVERY_MODULE)
            ahead += [
                m for x in boxes if not issubclass(type(x), nn.Module) for m in _modules_in(x)
            ]
    return list(found)


def attributes_of_others(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """The attributes of those modules that are not torch's own, or have been given a forward.

    >>> attributes_of_others([nn.ReLU()])
    []
    """
    owns = ((vars(m), type(m).__module__) for m in modules)
    return [own for own, room in owns if "forward" in own or not room.startswith("torch.")]


def _modules_in(x: Any) -> list[nn.Module]:
    """The modules in containers, and behind the callables in these. Each thing is opened once: they
    may hold each other."""
    found: list[nn.Module] = []
    opened_before: dict[int, Any] = {}
    ahead = [x]
    while ahead:
        x = ahead.pop()
        if issubclass(type(x), nn.Module):
            found.append(x)
        elif id(x) not in opened_before:
            opened_before[id(x)] = x
            ahead.extend(reversed(_inside(x)))
    return found


def _inside(x: Any) -> Sequence[Any]:
    """What is in a container or behind a callable; nothing if it refuses to say (code of the
    user's may raise what it likes)."""
    try:
        container = opened(x)
        return carried(x) if container is None else container.children
    except Exception:
        return ()
