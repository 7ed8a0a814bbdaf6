"""Configurations of an ORTTrainer's optimizer: its kind and its hyperparameters."""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Any

from ort_dynamo.training.requirements import is_number, require

__all__ = ["AdamConfig", "LambConfig", "SGDConfig", "_OptimizerConfig"]

_Groups = list[dict[str, Any]]


class _OptimizerConfig:
    """Configuration of an optimizer.

    Args:
        name: AdamOptimizer, LambOptimizer or SGDOptimizer.
        params: groups of weights: dicts with the weights' names under "params", and the hyperparameters that differ
            from the defaults. Weights that are in no group have the defaults. The groups are copied.
        defaults: the hyperparameters by name; `lr` is required.

    Attributes:
        name: as given.
        lr: the learning rate.
        defaults: the hyperparameters, `lambda_coef` under the name `lambda`.
        params: the groups, each with all hyperparameters.

    Raises:
        AssertionError: an argument is not as said.
    """

    def __init__(self, name: str, params: _Groups, defaults: dict[str, Any]) -> None:
        require(isinstance(name, str), "'name' must be a string")
        known = name in ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")
        require(known, "'name' must be one of 'AdamOptimizer', 'LambOptimizer' or 'SGDOptimizer'")
        require(isinstance(defaults, dict), "'defaults' must be a dict")
        require("lr" in defaults, "'defaults' must contain a {'lr' : positive number} entry")
        require(is_number(defaults["lr"]) and defaults["lr"] >= 0, "lr must be a positive number")
        require(isinstance(params, list), "'params' must be a list")
        self.name = name
        self.lr: float = float(defaults["lr"])
        self.defaults: dict[str, Any] = _renamed(defaults)
        self.params: list[dict[str, Any]] = [self._completed(group) for group in params]

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Give a group with all hyperparameters."""
        require(
            isinstance(group, dict) and len(group) > 1 and "params" in group,
            "Each dict inside 'params' must contain a {'params' : [model parameter names]} entry "
            "and additional entries for custom hyper parameter values",
        )
        names = group["params"]
        is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        require(is_list, "'params' of a parameter group must be a list of names")
        own = {key: value for key, value in group.items() if key != "params"}
        for key in own:
            known = _renamed({key: None}).keys() <= self.defaults.keys()
            require(known, f"'params' has {key} hyper parameter not present at 'defaults'")
        _check(own)
        return {**self.defaults, **_renamed(own), "params": list(names)}


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Give hyperparameters the names that the optimizer's attributes have: `lambda` is no name in Python."""
    return {"lambda" if key == "lambda_coef" else key: value for key, value in values.items()}


def _check(values: dict[str, Any]) -> None:
    """Check hyperparameters by their names: those that are there."""
    for name in ("lr", "alpha", "beta", "lambda_coef", "lambda", "epsilon"):
        if name in values:
            require(is_number(values[name]) and values[name] >= 0, f"'{name}' must be a positive number")
    for name in ("ratio_min", "ratio_max"):
        require(name not in values or isinstance(values[name], float), f"'{name}' must be a valid float")
    if "max_norm_clip" in values:
        require(values["max_norm_clip"] != 0, "'max_norm_clip' must not be 0")
        positive = is_number(values["max_norm_clip"]) and values["max_norm_clip"] > 0
        require(positive, "'max_norm_clip' must be a positive number")
    corrected = values.get("do_bias_correction", True)
    require(isinstance(corrected, bool), "'do_bias_correction' must be a boolean")
    mode = values.get("weight_decay_mode", AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE)
    require(isinstance(mode, AdamConfig.DecayMode), "'weight_decay_mode' must be a AdamConfig.DecayMode")


def _groups(params: _Groups, param_groups: _Groups | None) -> _Groups:
    """Return the groups, by whichever of their two names they were given."""
    if param_groups is None:
        return params
    require(params == [], "'params' and 'param_groups' are two names of one argument: give one of them")
    return param_groups


def _check_no_lr(groups: _Groups) -> None:
    if isinstance(groups, list):
        for group in groups:
            require(not isinstance(group, dict) or "lr" not in group, "'lr' is not supported inside params")


class SGDConfig(_OptimizerConfig):
    """Gradient descent: w <- w - lr * g.

    Args:
        params: has to be empty: all weights are updated alike.
        lr: the learning rate.
        param_groups: another name of params.

    Raises:
        AssertionError: params is not empty, or lr no number from 0 up.
    """

    def __init__(
        self,
        params: _Groups = [],  # noqa: B006  # the old default; nothing changes it
        lr: float = 0.001,
        *,
        param_groups: _Groups | None = None,
    ) -> None:
        groups = _groups(params, param_groups)
        super().__init__("SGDOptimizer", groups, {"lr": lr})
        require(groups == [], "'params' must be an empty list for SGD optimizer")


class AdamConfig(_OptimizerConfig):
    """Adam (Kingma and Ba, arXiv:1412.6980) with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    In the t-th update by the gradient g, with a = 1 - alpha^t and b = 1 - beta^t, or a = b = 1 without the correction
    of the bias: m <- alpha m + (1 - alpha) g, v <- beta v + (1 - beta) g^2. Then, as weight_decay_mode says,
    w <- w - lr ((m / a) / (sqrt(v / b) + epsilon) + lambda_coef w), or, with
    u = lr (sqrt(b) / a) m / (sqrt(v) + epsilon), w <- w - u - lr lambda_coef (w - u).

    Args:
        params: groups of weights: dicts with the weights' names under "params", and the hyperparameters that differ.
        lr: the learning rate; it cannot be in a group.
        alpha: the factor of the running average of the gradient.
        beta: the factor of the running average of its square.
        lambda_coef: the weight decay.
        epsilon: added to the denominator.
        max_norm_clip: gradients whose norm, over all weights, is greater are scaled down to it; above 0.
        do_bias_correction: correct the bias of the running averages, which start at 0.
        weight_decay_mode: an AdamConfig.DecayMode.
        param_groups: another name of params.

    Raises:
        AssertionError: a hyperparameter is out of its range, or a group is not as said.
    """

    @unique
    class DecayMode(IntEnum):
        """The values that weights decay by: those before or after the update."""

        BEFORE_WEIGHT_UPDATE = 0
        """By their values before the update, as in torch.optim.AdamW."""
        AFTER_WEIGHT_UPDATE = 1
        """By their updated values, as in the AdamW that transformers had."""

    def __init__(
        self,
        params: _Groups = [],  # noqa: B006  # the old default; nothing changes it
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
        *,
        param_groups: _Groups | None = None,
    ) -> None:
        groups = _groups(params, param_groups)
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode,
        }
        _check(defaults)
        _check_no_lr(groups)
        super().__init__("AdamOptimizer", groups, defaults)
        self.alpha = alpha
        self.beta = beta
        self.lambda_coef = lambda_coef
        self.epsilon = epsilon
        self.max_norm_clip = max_norm_clip
        self.do_bias_correction = do_bias_correction
        self.weight_decay_mode = weight_decay_mode


class LambConfig(_OptimizerConfig):
    """LAMB (You et al., arXiv:1904.00962).

    In the t-th update by the gradient g, with a = 1 - alpha^t and b = 1 - beta^t, or a = b = 1 without the correction
    of the bias: m <- alpha m + (1 - alpha) g, v <- beta v + (1 - beta) g^2,
    d = (m / a) / (sqrt(v / b) + epsilon) + lambda_coef w, where an element that is not finite becomes 0. Then
    w <- w - lr r d, with r = |w| / |d|, held between ratio_min and ratio_max, or 1 where a norm is 0.

    Args:
        params: groups of weights: dicts with the weights' names under "params", and the hyperparameters that differ.
        lr: the learning rate; it cannot be in a group.
        alpha: the factor of the running average of the gradient.
        beta: the factor of the running average of its square.
        lambda_coef: the weight decay.
        ratio_min: the least r, a float.
        ratio_max: the greatest r, a float.
        epsilon: added to the denominator.
        max_norm_clip: gradients whose norm, over all weights, is greater are scaled down to it; above 0.
        do_bias_correction: correct the bias of the running averages, which start at 0.
        param_groups: another name of params.

    Raises:
        AssertionError: a hyperparameter is out of its range, or a group is not as said.
    """

    def __init__(
        self,
        params: _Groups = [],  # noqa: B006  # the old default; nothing changes it
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = float("-inf"),
        ratio_max: float = float("inf"),
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
        *,
        param_groups: _Groups | None = None,
    ) -> None:
        groups = _groups(params, param_groups)
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        _check(defaults)
        _check_no_lr(groups)
        super().__init__("LambOptimizer", groups, defaults)
        self.alpha = alpha
        self.beta = beta
        self.lambda_coef = lambda_coef
        self.ratio_min = ratio_min
        self.ratio_max = ratio_max
        self.epsilon = epsilon
        self.max_norm_clip = max_norm_clip
        self.do_bias_correction = do_bias_correction
