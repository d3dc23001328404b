# SPDX-License-Identifier: Apache-2.0
from .network import ApuSmog, Decoded, Encoded, parameter_count
from .smog import Mixture, allocate

__all__ = ["ApuSmog", "Decoded", "Encoded", "Mixture", "allocate", "parameter_count"]
