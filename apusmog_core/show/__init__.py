# SPDX-License-Identifier: Apache-2.0
"""Clouds to look at: a 3-D page, and pictures."""
