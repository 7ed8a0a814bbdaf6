"""Passes on fx.GraphModule, before lowering."""
