"""Imported last by a process that many are forked from: what it holds is no garbage.

Else the first full collection in each fork looks at all of it, and so copies it: 0.4 s of CPU.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
