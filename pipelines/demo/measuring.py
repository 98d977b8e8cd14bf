"""Measures on the pixels what a picture shows, and compares it with what its prompt asks for.

It knows the palette, connected regions and silhouettes. It knows nothing of the model that made the
picture: drawn scenes pass the same check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from accel.pipelines.demo.drawing import draw_scene
from accel.pipelines.demo.scene import Background, Group, Scene
from accel.pipelines.demo.vocabulary import COLOURS, SHAPES

Mask = npt.NDArray[np.bool_]

SIDE = 128
"""Regions are looked for at this resolution."""

FARTHEST_COLOUR = 75.0
"""RGB distance beyond which a pixel has no colour of the palette (edges, shades, details)."""

SMALLEST_REGION = 30
"""Pixels, at `SIDE`, that a region needs to count as a thing."""

LARGEST_STRAY = 0.02
"""Share of the picture that colours nobody asked for may cover."""

SILHOUETTE = 32


@dataclass(frozen=True)
class Region:
    """One connected patch of one colour: its centre in units of the side, and its silhouette."""

    x: float
    y: float
    silhouette: Mask


@dataclass(frozen=True)
class Things:
    """What a prompt asks for: `count` things of one colour; noun and place are checked if given."""

    colour: str
    count: int
    noun: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Expectation:
    """What a prompt's picture must show. `order` is (axis, colour, colour): the things of the first
    colour are further left ("x") or further up ("y")."""

    background: str
    things: tuple[Things, ...]
    order: tuple[str, str, str] | None = None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Expectation:
        """Reads the form in which the check's prompts are written down."""
        order = fields.get("order")
        return cls(
            fields["background"],
            tuple(Things(**things) for things in fields["things"]),
            None if order is None else (order[0], order[1], order[2]),
        )

    @classmethod
    def of_scene(cls, scene: Scene) -> Expectation | None:
        """What can be measured of a scene; None where it has colours or things beyond measuring."""
        plain = scene.background.kind == "plain" and not scene.background.silent
        colours = [*scene.background.colours, *(group.colour for group in scene.groups)]
        measurable = all(colour in COLOURS for colour in colours) and len(set(colours)) == len(
            colours
        )
        flat = all(group.noun in SHAPES and not _is_thread(group) for group in scene.groups)
        # Through a ring the frame shows again, as another region.
        holed = scene.relation == "inside" and scene.groups[0].noun == "ring"
        if not (plain and measurable and flat) or holed:
            return None
        things = tuple(Things(g.colour, g.count, g.noun, g.place) for g in scene.groups)
        return cls(scene.background.colours[0], things, _order_of(scene))


def _is_thread(group: Group) -> bool:
    """Whether thinning eats the group: small rings."""
    return group.noun == "ring" and min(radius for _, _, radius in group.spots) < 0.095


def _order_of(scene: Scene) -> tuple[str, str, str] | None:
    if scene.relation not in ("left", "right", "above", "below"):
        return None
    first, second = (group.colour for group in scene.groups)
    if scene.relation in ("right", "below"):
        first, second = second, first
    return ("x" if scene.relation in ("left", "right") else "y", first, second)


def complaints(picture: Image.Image, expected: Expectation, *, shapes: bool = True) -> list[str]:
    """What is wrong with the picture, one line a fault; empty if it shows what is expected.

    `shapes=False` leaves silhouettes alone and looks at colours, counts and places only.
    """
    colours = colour_map(picture)
    found: list[str] = []
    background = background_colour(colours)
    if background != expected.background:
        found.append(f"background {background}, not {expected.background}")
    regions = {things.colour: regions_of(colours, things.colour) for things in expected.things}
    for things in expected.things:
        found += _faults(things, regions[things.colour], shapes)
    if expected.order is not None:
        axis, first, second = expected.order
        if not _mean(regions[first], axis) < _mean(regions[second], axis):
            found.append(f"{first} is not {'left of' if axis == 'x' else 'above'} {second}")
    wanted = {expected.background, *regions}
    stray = sorted(name for name in COLOURS if name not in wanted and _covers(colours, name))
    return found + [f"unasked {name}" for name in stray]


def _faults(things: Things, regions: list[Region], shapes: bool) -> list[str]:
    found = []
    if len(regions) != things.count:
        found.append(f"{len(regions)} {things.colour} things, not {things.count}")
    if things.place is not None and not all(_is_at(region, things.place) for region in regions):
        found.append(f"{things.colour} is not at {things.place}")
    if shapes and things.noun is not None:
        seen = {shape_of(region.silhouette) for region in regions} - {things.noun}
        found += [f"{things.colour} {shape}, not {things.noun}" for shape in sorted(seen)]
    return found


def colour_map(picture: Image.Image) -> npt.NDArray[np.intp]:
    """(height, width) indices into the palette; -1 where a pixel is near none of its colours."""
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    palette = np.array(list(COLOURS.values()), dtype=np.float32)
    distances = np.linalg.norm(pixels[:, :, None, :] - palette, axis=-1)
    nearest = distances.argmin(axis=-1)
    return np.where(distances.min(axis=-1) <= FARTHEST_COLOUR, nearest, -1)


def background_colour(colours: npt.NDArray[np.intp]) -> str | None:
    """The palette colour of most of the picture's rim."""
    rim = np.concatenate([colours[:3].ravel(), colours[-3:].ravel(), colours[:, [0, -1]].ravel()])
    index, _ = Counter(rim.tolist()).most_common(1)[0]
    return None if index < 0 else list(COLOURS)[index]


def regions_of(colours: npt.NDArray[np.intp], colour: str) -> list[Region]:
    """The connected patches of a colour, edges and specks left out."""
    mask = _thinned(colours == list(COLOURS).index(colour), rounds=max(1, colours.shape[0] // SIDE))
    step = max(1, colours.shape[0] // SIDE)
    labels = mask[::step, ::step].copy()
    regions = []
    for y, x in np.argwhere(labels).tolist():
        if labels[y, x]:
            patch = _flooded(labels, y, x)
            if len(patch) >= SMALLEST_REGION:
                regions.append(_region(patch, labels.shape[0]))
    return regions


def _flooded(labels: Mask, y: int, x: int) -> npt.NDArray[np.intp]:
    """Takes the patch around (y, x), diagonals included, out of `labels`: (n, 2) coordinates."""
    height, width = labels.shape
    labels[y, x] = False
    patch, waiting = [], [(y, x)]
    while waiting:
        row, column = waiting.pop()
        patch.append((row, column))
        for near in range(max(0, row - 1), min(height, row + 2)):
            for side in range(max(0, column - 1), min(width, column + 2)):
                if labels[near, side]:
                    labels[near, side] = False
                    waiting.append((near, side))
    return np.array(patch)


def _region(patch: npt.NDArray[np.intp], side: int) -> Region:
    low, high = patch.min(axis=0), patch.max(axis=0)
    extent = int((high - low).max()) + 1
    corner = (low + high + 1 - extent) // 2  # a square around the patch: its proportions stay
    image = np.zeros((extent, extent), dtype=np.uint8)
    image[tuple((patch - corner).T)] = 255
    scaled = Image.fromarray(image).resize((SILHOUETTE, SILHOUETTE), Image.Resampling.BOX)
    y, x = patch.mean(axis=0) / side
    return Region(float(x), float(y), np.asarray(scaled) >= 128)


def _thinned(mask: Mask, rounds: int) -> Mask:
    """Without its rim, `rounds` pixels deep: the mixed colours of edges never make a region."""
    for _ in range(rounds):
        mask = np.pad(mask, 1, constant_values=True)
        mask = mask[:, :-2] & mask[:, 1:-1] & mask[:, 2:]
        mask = mask[:-2] & mask[1:-1] & mask[2:]
    return mask


def shape_of(silhouette: Mask) -> str:
    """The shape of the world whose silhouette overlaps most (intersection over union)."""

    def overlap(other: Mask) -> float:
        return float((silhouette & other).sum() / (silhouette | other).sum())

    likeness = {noun: max(map(overlap, drawn)) for noun, drawn in _silhouettes().items()}
    return max(likeness, key=lambda noun: likeness[noun])


@cache
def _silhouettes() -> dict[str, tuple[Mask, ...]]:
    """Every flat shape as it is drawn, small and large (thinning eats more of a small one)."""
    drawn: dict[str, tuple[Mask, ...]] = {}
    for noun in SHAPES:
        masks = []
        for radius in (0.1, 0.2, 0.36):
            group = Group(noun, "red", ((0.5, 0.5, radius),))
            picture = draw_scene(Scene(Background("plain", ("white",)), (group,)), 256, Random(0))
            masks.append(regions_of(colour_map(picture), "red")[0].silhouette)
        drawn[noun] = tuple(masks)
    return drawn


def _covers(colours: npt.NDArray[np.intp], name: str) -> bool:
    mask = _thinned(colours == list(COLOURS).index(name), rounds=2)
    return float(mask.mean()) > LARGEST_STRAY


def _mean(regions: list[Region], axis: str) -> float:
    """The mean position along an axis; NaN, which compares false, where there is nothing."""
    values = [region.x if axis == "x" else region.y for region in regions]
    return sum(values) / len(values) if values else float("nan")


def _is_at(region: Region, place: str) -> bool:
    if place == "centre":
        return 0.36 < region.x < 0.64 and 0.36 < region.y < 0.64
    tests = {
        "left": region.x < 0.42,
        "right": region.x > 0.58,
        "top": region.y < 0.42,
        "bottom": region.y > 0.58,
    }
    return all(tests[word] for word in place.split())
