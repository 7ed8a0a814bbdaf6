"""What passes share: what they read off graphs, and edits that are too long for the pass that makes them."""
