"""Cast propagation: casts between float32 and narrower types move to where they cost least."""
