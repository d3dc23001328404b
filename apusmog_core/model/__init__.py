# SPDX-License-Identifier: Apache-2.0
from .network import ApuSmog, Decoded, Encoded, parameter_count
from .smog import Mixture

__all__ = ["ApuSmog", "Decoded", "Encoded", "Mixture", "parameter_count"]
