# SPDX-License-Identifier: Apache-2.0
"""APU-SMOG: arbitrary point cloud upsampling, without ROS."""

__version__ = "0.1.0"
__all__ = ["Upsampler", "ScanPipeline", "__version__"]


def __getattr__(name: str):  # importing torch takes seconds: only for who needs it
    if name == "Upsampler":
        from .upsampler import Upsampler

        return Upsampler
    if name == "ScanPipeline":
        from .pipeline import ScanPipeline

        return ScanPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
