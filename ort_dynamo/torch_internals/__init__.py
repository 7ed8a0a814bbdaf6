"""The one door to what torch keeps private.

Each name here says what it gives, which of the tested versions (`versions.TESTED`) have it how, and what happens
without it. What no version lacks is imported plainly; the rest is asked for once, when its module is imported.
"""
