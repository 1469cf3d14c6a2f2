"""vLLM's plugin of marlinspike: see its README."""

from ._install import register

__all__ = ["register"]
