"""Received bytes into tensors on one GPU. Needs torch and cupy, which are imported when a destination is made."""

from .destination import CudaDestination

__all__ = ["CudaDestination"]
