"""Gradients of images with symbolic sizes, where torch's C++ code for a gradient takes fixed sizes only.

Without them a grid of an affine map (a spatial transformer) or an antialiased cubic resize trains with one batch size
only: the compile for a symbolic one raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ort_dynamo.torch_internals.kernels.dispatcher import add_traced_kernel, share_shapes
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["allow_symbolic_sizes"]


def allow_symbolic_sizes() -> None:
    """Give torch, permanently, the formula and the shapes that it lacks for symbolic sizes."""
    add_traced_kernel(aten.affine_grid_generator_backward.default, _affine_grid_backward)
    share_shapes(aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default)


def _affine_grid_backward(grad: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """Compute the gradient of a matrix from that of its grid, as torch's C++ function does."""
    # The grid of the identity has the coordinates of each pixel, whose matmul with the matrix is the grid.
    batch, channels, *space = size
    rank = len(space)
    identity = torch.eye(rank, rank + 1, dtype=grad.dtype, device=grad.device)
    grid = aten.affine_grid_generator.default(identity[None], [1, channels, *space], align_corners)
    coordinates = grid.reshape(1, -1, rank)
    rows = torch.cat([coordinates, torch.ones_like(coordinates[..., :1])], -1)
    return torch.bmm(rows.mT.expand(batch, -1, -1), grad.reshape(batch, -1, rank)).mT
