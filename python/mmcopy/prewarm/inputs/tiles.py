"""Towers that take squares of one size: a picture is one such square, or is cut into several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mmcopy.encoders.towers import find_towers
from mmcopy.errors import ConfigError

from .family import Config, Family, Input, Noise, Shape, number, vision_of

__all__ = ["InternVl", "Llama4", "SquareFamily", "TileFamily", "best_grid"]


class SquareFamily(Family):
    """Every picture is resized to the tower's square. ``pixel_values`` is (pictures, 3, side, side).

    The number of pictures in one encode is all that varies.
    """

    model_types: ClassVar[tuple[str, ...]] = (
        "gemma3", "aya_vision", "cohere2_vision", "paligemma", "clip_vision_model", "siglip_vision_model",
    )  # fmt: skip
    default_side: ClassVar[int] = 336
    most: ClassVar[int] = 16
    """Squares of the largest warm-up."""

    def side(self, config: Config) -> int:
        """Height and width of the tower's square."""
        return number(vision_of(config), "image_size", self.default_side)

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        square = (self.side(config), self.side(config))
        most = self.most if max_pixels is None else max(1, max_pixels // (square[0] * square[1]))
        return [Shape(modality, (square,) * count) for count in sorted({1, 2, 3, most}) if count <= most]

    def fit(self, config: Config, shape: Shape) -> Shape:
        square = (self.side(config), self.side(config))
        return Shape(shape.modality, tuple((*item[:-2], *square) for item in shape.items))

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        side = self.side(config)
        return {"pixel_values": Noise((self.squares(config, shape), 3, side, side))}

    def squares(self, config: Config, shape: Shape) -> int:
        """How many squares a fitted shape becomes."""
        return len(shape.items)


class TileFamily(SquareFamily):
    """A picture is cut into a grid of squares, and is there once more as a whole when they are several."""

    max_tiles: ClassVar[int] = 12

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        side = self.side(config)
        most = self.max_tiles if max_pixels is None else max(1, min(self.max_tiles, max_pixels // (side * side)))
        grids = [((1, 1),), ((1, 2),), ((1, 1), (1, 2)), ((1, most),)]
        fitting = [grid for grid in grids if all(rows * columns <= most for rows, columns in grid)]
        shapes = [Shape(modality, tuple((rows * side, columns * side) for rows, columns in grid)) for grid in fitting]
        return list(dict.fromkeys(shapes))

    def fit(self, config: Config, shape: Shape) -> Shape:
        side = self.side(config)
        grids = [best_grid(item[-2], item[-1], side, self.max_tiles) for item in shape.items]
        items = zip(shape.items, grids, strict=True)
        return Shape(
            shape.modality, tuple((*item[:-2], rows * side, columns * side) for item, (rows, columns) in items)
        )

    def shrink(self, config: Config, shape: Shape) -> Shape | None:
        """Half of the squares. Half of the area has the same proportions, and so would become the same grid."""
        if shape.modality != "image" or len(shape.items) > 1:
            return super().shrink(config, shape)
        side = self.side(config)
        rows, columns = (each // side for each in shape.items[0])
        if rows * columns <= 1:
            return None
        rows, columns = (rows, columns // 2) if columns >= rows else (rows // 2, columns)
        return Shape(shape.modality, ((rows * side, columns * side),))

    def squares(self, config: Config, shape: Shape) -> int:
        area = self.side(config) ** 2
        counts = [item[-2] * item[-1] // area for item in shape.items]
        return sum(count + (1 if count > 1 else 0) for count in counts)


class InternVl(TileFamily):
    """InternVL: up to 12 squares of 448 and the whole picture; a video's frames come as pictures."""

    model_types: ClassVar[tuple[str, ...]] = ("internvl", "internvl_vision", "internvl_chat")
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    default_side: ClassVar[int] = 448

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        if modality == "image":
            return super().shapes(config, modality, max_pixels)
        side = self.side(config)
        most = 16 if max_pixels is None else max(1, max_pixels // (side * side))
        return [Shape(modality, ((frames, side, side),)) for frames in sorted({min(8, most), most})]

    def fit(self, config: Config, shape: Shape) -> Shape:
        if shape.modality == "image":
            return super().fit(config, shape)
        return SquareFamily.fit(self, config, shape)

    def squares(self, config: Config, shape: Shape) -> int:
        if shape.modality == "image":
            return super().squares(config, shape)
        return sum(item[0] for item in shape.items)

    def encode(self, model: Any, modality: str, tensors: Mapping[str, Any]) -> Any:
        return super().encode(model, "image", tensors)


class Llama4(TileFamily):
    """Llama 4: up to 16 squares of 336 and the whole picture."""

    model_types: ClassVar[tuple[str, ...]] = ("llama4", "llama4_vision_model")
    max_tiles: ClassVar[int] = 16

    def encode(self, model: Any, modality: str, tensors: Mapping[str, Any]) -> Any:
        """By the tower, which is all that the model's method calls; that one's arguments differ by version."""
        tower = find_towers(model)[modality]
        if isinstance(tower, str):
            raise ConfigError(f"no {modality} encoder: {tower}")
        return self.encode_tower(tower.module, modality, tensors)


def best_grid(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of the grid, of ``most`` squares at most, whose proportions are nearest to a picture's.

    Among equals the larger grid, if the picture fills more than half of it.
    """
    ratio = width / height
    best, nearest = (1, 1), abs(ratio - 1)
    grids = sorted(
        ((rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)),
        key=lambda grid: grid[0] * grid[1],
    )
    for rows, columns in grids:
        distance = abs(ratio - columns / rows)
        if distance < nearest or (distance == nearest and height * width > side * side * rows * columns / 2):
            best, nearest = (rows, columns), distance
    return best
