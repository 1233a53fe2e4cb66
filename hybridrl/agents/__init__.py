"""Conversations with tools, environments and programs: an agent holds a ``Conversation``."""
