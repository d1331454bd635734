"""The protocol as pure state machines: an event and the time in, actions out. Drivers elsewhere carry the actions out."""
