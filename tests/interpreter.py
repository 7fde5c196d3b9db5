"""Triton's interpreter, with less work around every operation of a kernel; what a kernel computes stays the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any


def speed_up_interpreter() -> None:
    """Leave out what the interpreter computes and does not use.

    It patches the language again at every call of a function in a kernel, which takes half of the time of a launch; it
    computes every integer operation a second time, in int64, for an assertion that is on in its debug mode only; and it
    makes the same table of dtypes for every number.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    module: Any = interpreter
    if hasattr(module, "fdp_patched"):
        return
    module.fdp_patched = True
    module._patch_lang = _once_a_launch(module)
    module._get_np_dtype = _by_table(module)
    builder = module.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _by_table(module: Any) -> Callable[[Any], Any]:
    """Return ``module._get_np_dtype``, which remembers what it found for a scalar; pointers cannot be looked up."""
    found, pointer = cache(module._get_np_dtype), module.tl.pointer_type
    of_pointers = module.np.dtype(module.np.uint64)

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return of_pointers if isinstance(scalar, pointer) else found(scalar)

    return get_np_dtype


def _once_a_launch(module: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``module._patch_lang``, but for functions that see no module of the language that is not patched yet."""
    patch, scope_type = module._patch_lang, module._LangPatchScope
    patched: set[ModuleType] = set()  # in the launch that is under way

    @cache
    def seen_by(fn: Callable[..., Any]) -> frozenset[ModuleType]:
        languages = (module.tl, module.tl.core)
        return frozenset(value for value in fn.__globals__.values() if inspect.ismodule(value) and value in languages)

    def patch_lang(fn: Callable[..., Any]) -> Any:
        outermost, seen = not patched, seen_by(fn)
        if not outermost and seen <= patched:
            return scope_type()
        scope = patch(fn)
        patched.update(seen)
        if outermost:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    return patch_lang
