"""Curves as SVG, without a library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

TEXT, GRID = "#57606a", "#d0d7de"
GREY, BLUE, ORANGE, GREEN = COLORS = ("#8c959f", "#4051b5", "#d9480f", "#2b8a3e")
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A panel in pixels, and which numbers its sides stand for."""

    last_x: float
    low: float = 0.0
    high: float = 1.0
    width: float = 760
    height: float = 300
    left: float = 46
    right: float = 46
    top: float = 46
    bottom: float = 46

    def pixel(self, point: Point) -> Point:
        x = self.left + point[0] / self.last_x * (self.width - self.left - self.right)
        share = (point[1] - self.low) / (self.high - self.low)
        return x, self.top + (1 - share) * (self.height - self.top - self.bottom)

    def curve(
        self, points: Sequence[Point], color: str, *, width: float = 2.5, opacity: float = 1
    ) -> str:
        style = f'stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"'
        return f'<polyline fill="none" {style} points="{self._pixels(points)}"/>'

    def area(self, points: Sequence[Point], color: str) -> str:
        return f'<polygon fill="{color}" fill-opacity="0.25" points="{self._pixels(points)}"/>'

    def axes(self, ys: Iterable[float], xs: Iterable[tuple[float, str]]) -> Iterator[str]:
        """Draw a line and a number for each ``y``, and write below each ``x``."""
        for y in ys:
            yield self.curve([(0, y), (self.last_x, y)], GRID, width=1)
            left, at = self.pixel((0, y))
            yield words(left - 6, at + 4, f"{y:.1f}", anchor="end")
        for x, text in xs:
            at, bottom = self.pixel((x, self.low))
            yield words(at, bottom + 18, text, anchor="middle")

    def _pixels(self, points: Iterable[Point]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.pixel(point)) for point in points)


def words(x: float, y: float, text: str, *, color: str = TEXT, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{text}</text>'


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    back = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"
