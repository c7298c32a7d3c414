"""Choices that recipes name and networks take. Free of torch."""

from typing import Literal

Norm = Literal["batch", "group"]
Decoding = Literal["pyramid", "transposed", "thesis"]
