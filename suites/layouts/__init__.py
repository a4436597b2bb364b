"""Claims about an engine that is one axis of a layout, with others cut by hand around it."""
