"""A model's first-order expansion in its parameters (Ortiz-Jimenez et al., 2023; NTK-FedAvg, Muhamed et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedloom.core.errors import RecipeError
from fedloom.models.nets import Encoder, PyramidEncoder


class Linearised(Encoder):
    """f(x; theta0) + J(x) (theta - theta0): B x ... to B x features, by one forward-mode product with the Jacobian J.

    theta are the parameters of `encoder` that need a gradient, under the names they have there; theta0 is their value
    now. The encoder's modules become this one's, so `encoder` should not be used on its own any more. With LoRA the
    factors are theta: since B is 0 in theta0, the expansion is B A0 and A has no gradient.

    The output is linear in theta, so the mean of parameters gives the mean of outputs. Norm layers use their running
    statistics and dropout is off, in training too. theta0 is a buffer outside the state dictionary: it moves with the
    module and is copied with it, but is neither trained nor sent. On a CPU a step of a small
    vision transformer takes about four times as long, of a convolutional network hardly longer.

    RecipeError for an encoder with feature maps.
    """

    plain: Encoder
    """The encoder as it was, on the same parameters."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        if isinstance(encoder, PyramidEncoder):
            raise RecipeError(f"only encoders of features can be linearised, found maps of {type(encoder).__name__}")
        self.features, self.reads_tokens = encoder.features, encoder.reads_tokens
        start = [p.detach().reshape(-1) for p in encoder.parameters() if p.requires_grad]
        # One and the same dictionaries: whatever moves, binds or replaces a tensor here does so in the encoder.
        self._modules, self._parameters, self._buffers = encoder._modules, encoder._parameters, encoder._buffers
        self._non_persistent_buffers_set = encoder._non_persistent_buffers_set
        self.register_buffer("origin", torch.cat(start), persistent=False)
        self.__dict__["plain"] = encoder.eval()  # not a submodule, which would give every parameter a second name
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """B x ... to B x features."""
        theta = {name: p for name, p in self.named_parameters() if p.requires_grad}
        origin: Tensor = self.get_buffer("origin")
        pieces = origin.split([p.numel() for p in theta.values()])
        theta0 = {name: piece.view_as(p) for piece, (name, p) in zip(pieces, theta.items(), strict=True)}
        change = {name: p - theta0[name] for name, p in theta.items()}

        def plain(weights: dict[str, Tensor]) -> Tensor:
            value: Tensor = functional_call(self.plain, weights, (x,))
            return value

        # Group norm has no forward mode for images with the channels last in memory. Flattened and viewed again, they
        # are laid out plainly; strides alone do not tell, since those of images of one channel fit either layout.
        x = x.reshape(-1).view(x.shape)
        # The fused kernels of attention have no forward mode, and torch before 2.9 has none in inference mode.
        with_grad = torch.is_grad_enabled()
        with sdpa_kernel(SDPBackend.MATH), torch.inference_mode(False), torch.set_grad_enabled(with_grad):
            there_and_change = jvp(plain, (theta0,), (change,))
        features: Tensor = there_and_change[0] + there_and_change[1]
        return features

    def train(self, mode: bool = True) -> Linearised:
        """Stays in evaluation mode, since the network is expanded as it is used."""
        return super().train(False)
