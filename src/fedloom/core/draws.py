"""Random draws for one purpose: from a public seed, which everybody may repeat, or from a secret, which nobody can."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import torch
from torch import Tensor

from fedloom.core.lazy import need

SECRET = 32
"""Bytes of a secret, and of the key that follows from it for each purpose."""
BLOCK = 1 << 16
"""Normal numbers that are computed at a time: large enough for vectors, small enough for the cache."""


class SeededDraws:
    """Draws from a torch generator. The CPU's uses 32 bits of its seed, so they can be found by trying all seeds."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def normal(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return n independent standard normal numbers."""
        return torch.randn(n, generator=self._generator, dtype=dtype)

    def uniform(self, n: int) -> Tensor:
        """Return n independent numbers (float64) of at least 0 and less than 1."""
        return torch.rand(n, generator=self._generator, dtype=torch.float64)

    def permutation(self, n: int) -> Tensor:
        """Return 0 to n - 1 (int64) in random order."""
        return torch.randperm(n, generator=self._generator)


class SecretDraws:
    """Draws from a keystream: AES-256 in counter mode, with a key that is keyed BLAKE2b of the purpose.

    Without the secret nobody can tell the draws from random ones, nor those of two purposes from each other. Raises
    ValueError for a secret of other than SECRET bytes, UserError without the package cryptography.
    """

    def __init__(self, secret: bytes, *purpose: object) -> None:
        if len(secret) != SECRET:
            raise ValueError(f"secret: {len(secret)} bytes found, expected {SECRET}; draw one with new_secret()")
        ciphers = need("cryptography.hazmat.primitives.ciphers", "privacy")
        key = hashlib.blake2b(json.dumps(purpose).encode(), key=secret, digest_size=SECRET, person=b"fedloom draws")
        # no two streams share a key, so all may count from 0
        cipher = ciphers.Cipher(ciphers.algorithms.AES(key.digest()), ciphers.modes.CTR(bytes(16)))
        self._stream = cipher.encryptor()

    def normal(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return n independent standard normal numbers (Box and Muller, in float64), none beyond 8.6."""
        drawn = torch.empty(n, dtype=dtype)
        for part in drawn.split(BLOCK):
            half = (len(part) + 1) // 2
            radius, angle = self.uniform(2 * half).split(half)
            radius.neg_().log1p_().mul_(-2).sqrt_()  # of 1 - u, which is never 0
            angle.mul_(2 * math.pi)
            part[:half] = angle.cos().mul_(radius)
            part[half:] = angle.sin_().mul_(radius)[: len(part) - half]
        return drawn

    def uniform(self, n: int) -> Tensor:
        """Return n independent multiples of 2^-53 (float64) of at least 0 and less than 1."""
        bits = np.frombuffer(self._stream.update(bytes(8 * n)), "<u8")
        return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)

    def permutation(self, n: int) -> Tensor:
        """Return 0 to n - 1 (int64) in random order."""
        return self.uniform(n).argsort(stable=True)


Draws = SeededDraws | SecretDraws
