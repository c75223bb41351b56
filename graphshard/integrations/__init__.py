"""Frameworks in which one line of the user's script is not enough; see docs/integrations/.

Each module is for one framework, which it imports when it is imported itself.
"""
