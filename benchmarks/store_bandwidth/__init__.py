"""How fast values go to a store and come back, by several clients and a limit."""
