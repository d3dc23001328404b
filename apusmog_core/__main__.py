# SPDX-License-Identifier: Apache-2.0
"""`python -m apusmog_core` is `apusmog`."""

from apusmog_core.cli import main

raise SystemExit(main())
