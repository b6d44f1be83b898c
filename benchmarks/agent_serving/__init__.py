"""Real coding agents on live servers: stock, a plain tier, hints, wrong hints."""
