"""``python -m hybridrl``: the same as ``python -m hybridrl.main``."""

from hybridrl.main import main

main()
