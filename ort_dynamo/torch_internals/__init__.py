"""The package that uses private names of torch.

Each name here says its value, which of the tested versions (`versions.TESTED`) have it how, and the effect of its
absence. Names that no version lacks are imported plainly; the rest is asked for once, when its module is imported.
"""
