"""Advantage estimators: from rewards to how much better each response was than expected.

Each public top-level function here is a part that the configuration knows by its name.
"""
