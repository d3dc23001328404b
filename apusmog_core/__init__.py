# SPDX-License-Identifier: Apache-2.0
"""APU-SMOG: arbitrary point cloud upsampling, without ROS."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import PipelineConfig as PipelineConfig
    from .pipeline import DenseScan as DenseScan
    from .pipeline import ScanPipeline as ScanPipeline
    from .upsampler import Upsampler as Upsampler

__version__ = "0.1.0"  # setup.py reads it here; package.xml repeats it
__all__ = ["Upsampler", "ScanPipeline", "PipelineConfig", "DenseScan", "__version__"]

_MODULES = {
    "Upsampler": "upsampler",
    "ScanPipeline": "pipeline",
    "DenseScan": "pipeline",
    "PipelineConfig": "config",
}


def __getattr__(name: str):  # importing torch takes seconds: only for who needs it
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
