"""Reward functions and who calls them.

``trainer/reward.py`` asks ``scorer.py``, that asks ``runner.py``, in whose processes ``child.py``
calls the function. A new built-in one is a function in ``functions.py`` and a name in
``config/reward.py``.
"""
