"""Prediction heads of dense tasks."""

from __future__ import annotations

from torch import Tensor, nn


class UpHead(nn.Sequential):
    """Features at stride 4 to predictions at full size: two transposed convolutions and a 1x1 convolution.

    B x F x H x W becomes B x `channels` x 4H x 4W, over F/2 and F/4 channels and with no activation in between
    (FedHCA2's release; 96, 48, 24 for Swin-T).
    """

    def __init__(self, features: int, channels: int) -> None:
        half, quarter = max(features // 2, 1), max(features // 4, 1)
        super().__init__(
            nn.ConvTranspose2d(features, half, kernel_size=2, stride=2),
            nn.ConvTranspose2d(half, quarter, kernel_size=2, stride=2),
            nn.Conv2d(quarter, channels, kernel_size=1),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Predictions before any activation."""
        found: Tensor = super().forward(features)
        return found
