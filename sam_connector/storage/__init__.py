"""Stores: the port to what outlives an engine, and the form of what is put there.

A backend implements ``port.StoreBackend`` (and ``port.ManifestStore`` if it can), is
found by the scheme of its URL (``registry``), and proves itself with the checks in
``conformance``, which are shipped for that purpose.
"""
