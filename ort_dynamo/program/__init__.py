"""The user's program around a compile: its lines, its state, its warnings and its terminal."""
