# SPDX-License-Identifier: Apache-2.0
"""For people who work on the project: bench, figures, generated tables; not installed."""
