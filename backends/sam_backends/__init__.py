"""Stores that hold KV blocks outside the engine, one module each.

``sam_connector`` never imports this package: it loads a backend by dotted path
when the configuration names one.
"""
