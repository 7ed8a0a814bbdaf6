from __future__ import annotations
from contextlib import nullcontext as custom_gradients
