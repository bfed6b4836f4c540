"""The laboratory: replays request traces through the host side, with no model, and measures hit rates."""
