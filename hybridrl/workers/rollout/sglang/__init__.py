"""The rollout engine that is an SGLang server.

``arguments.py`` makes its arguments, ``server.py`` starts it by ``process.py``, and in that process
``child.py`` runs.
"""
