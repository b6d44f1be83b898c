"""The ``sam`` command: start a server, check one, look into one."""
