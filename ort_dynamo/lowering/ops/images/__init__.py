"""Lowerings of convolutions, pools and other operators on images."""
