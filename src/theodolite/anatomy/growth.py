"""Which dimensions follow the width: the same network at two widths, shape against shape."""

from __future__ import annotations

from collections.abc import Container

from theodolite.anatomy.part import AnatomyError
from theodolite.anatomy.specimen import Specimen
from theodolite.core.size import Size


def grown_axes(
    main: Specimen, wider: Specimen, size: Size, left_alone: Container[str] = ()
) -> dict[str, tuple[int, ...]]:
    """By parameter: the dimensions that are larger at twice the width.

    Width may add tensors (a norm per head), but takes none away and makes none smaller; but for those that
    are left alone, as they are not trained.
    """
    here, there = f"build({size.width}, {size.depth})", f"build({2 * size.width}, {size.depth})"
    missing = [name for name in main.shapes if name not in wider.shapes and name not in left_alone]
    if missing:
        raise AnatomyError(
            f"{here} has the tensor {missing[0]}, {there} has not: width may not take tensors away"
        )
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in main.shapes.items():
        other = wider.shapes.get(name, ())
        if len(other) != len(shape) or any(a > b for a, b in zip(shape, other, strict=True)):
            if name in left_alone:
                found[name] = ()
                continue
            raise AnatomyError(
                f"{name} has shape {shape} in {here} but {other} in {there}: it does not grow with width"
            )
        found[name] = tuple(axis for axis, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b)
    if not any(found.values()):
        if len(wider.shapes) > len(main.shapes):
            raise AnatomyError(
                f"{there} has more tensors than {here}, but none that is larger: width adds no width"
            )
        raise AnatomyError(
            f"{there} has the same shapes as {here}: build ignores its width. Use it to size the layers"
        )
    return found
