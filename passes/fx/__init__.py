"""These passes rewrite an fx.GraphModule, before lowering."""
