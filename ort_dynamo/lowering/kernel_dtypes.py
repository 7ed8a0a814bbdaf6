"""Tables of the dtypes that torch's CPU kernels accept and mix.

tests/refused/test_kernel_dtypes.py checks each rule by calling the kernels with every dtype and pairs of dtypes. If the
tested versions of torch differ, a rule has the dtypes that all of them accept. A letter is a dtype. An operator is
given by its ATen name, with its overload ("div.Tensor_mode") if overloads differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

__all__ = ["FLOAT32_BESIDE_HALVES", "LETTERS", "MIXING", "OTHER_ARGUMENTS", "PROMOTING", "TAKEN", "UNKNOWN"]

_V = TypeVar("_V")

LETTERS: Mapping[torch.dtype, str] = {
    torch.float32: "f",
    torch.float64: "d",
    torch.float16: "h",
    torch.bfloat16: "b",
    torch.int64: "l",
    torch.int32: "i",
    torch.int16: "s",
    torch.int8: "c",
    torch.uint8: "u",
    torch.bool: "?",
}
"""dtype -> its letter; of a call with any other nothing is known."""

_ANY = "".join(LETTERS.values())
_NUMBERS = "fdhbliscu"
_INTEGERS = "liscu"
_FLOATS = "fdhb"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _by_name(*rows: tuple[str, _V]) -> Mapping[str, _V]:
    """Give each of the names in a row its value."""
    return {name: value for names, value in rows for name in names.split()}


PROMOTING = _names("""
    __and__ __lshift__ __or__ __rshift__ __xor__
    add addcmul addr as_strided_scatter atan2 bernoulli bitwise_and bitwise_left_shift bitwise_or
    bitwise_right_shift bitwise_xor block_diag bucketize cat clamp clamp_max clamp_min copy copysign
    diagonal_scatter div elu_backward eq fill floor_divide fmax fmin fmod gcd ge gt hardshrink_backward
    hardsigmoid_backward hardswish_backward hardtanh_backward hypot igamma igammac index_fill lcm le
    leaky_relu_backward linspace logaddexp logaddexp2 logical_and logical_or logical_xor logit_backward
    logspace lt masked_fill maximum minimum mse_loss mul ne nextafter pow remainder resize_as searchsorted
    select_scatter sigmoid_backward silu_backward slice_scatter smooth_l1_loss softplus_backward
    softshrink_backward special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_xlog1py special_zeta
    stack tanh_backward where xlogy
""")
"""Operators that take any mix of dtypes, if they take the dtype to which it promotes."""

MIXING = _names("""
    _fused_rms_norm _fused_rms_norm_backward addcdiv binary_cross_entropy_with_logits dist isin
    mish_backward mse_loss_backward normal rrelu_with_noise_backward rsub smooth_l1_loss_backward
    soft_margin_loss_backward sub
""")
"""Operators that take any mix of the dtypes that they take."""

FLOAT32_BESIDE_HALVES: Mapping[str, tuple[str, ...]] = _by_name(
    (
        """
            _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional _native_batch_norm_legit
            _native_batch_norm_legit_functional _native_batch_norm_legit_no_training batch_norm_backward
            cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward native_batch_norm
            native_batch_norm_backward
        """,
        (
            "weight",
            "bias",
            "running_mean",
            "running_var",
        ),
    ),
    (
        """
            native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
        """,
        (
            "weight",
            "bias",
        ),
    ),
)
"""Operator -> arguments that may all be float32 while the other arguments are float16 or bfloat16."""

OTHER_ARGUMENTS: Mapping[str, Mapping[str, str]] = _by_name(
    (
        "_scaled_dot_product_flash_attention_for_cpu",
        {"attn_mask": _FLOATS},
    ),
    # Values that the forward saves for the gradient have dtypes about which fake tensors and kernels differ.
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        {"attn_mask": _FLOATS, "logsumexp": _FLOATS},
    ),
    (
        "native_group_norm_backward native_layer_norm_backward",
        {"mean": _FLOATS, "rstd": _FLOATS},
    ),
    (
        """
            batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward native_batch_norm_backward
        """,
        {
            "save_mean": _FLOATS,
            "save_invstd": _FLOATS,
            "save_var": _FLOATS,
            "reserve": _ANY,
            "reserveSpace": _ANY,
        },
    ),
    (
        "_weight_norm_interface_backward",
        {"saved_norms": _FLOATS},
    ),
    (
        """
            gather index_add index_reduce index_select scatter scatter_add scatter_reduce
        """,
        {"index": "li"},
    ),
    (
        "index_copy index_fill put take",
        {"index": "l"},
    ),
    (
        "_unsafe_index _unsafe_index_put index index_put",
        {"indices": "liu?"},
    ),
    (
        "_unsafe_masked_index _unsafe_masked_index_put_accumulate",
        {"indices": "liu?", "mask": _ANY},
    ),
    (
        """
            adaptive_max_pool2d_backward adaptive_max_pool3d_backward fractional_max_pool2d_backward
            fractional_max_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
            max_unpool2d max_unpool3d
        """,
        {"indices": "l"},
    ),
    (
        "embedding embedding_dense_backward embedding_renorm",
        {"indices": "li"},
    ),
    (
        """
            _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
            _embedding_bag_per_sample_weights_backward
        """,
        {"indices": "li", "offsets": "li", "offset2bag": "li", "bag_size": "li", "maximum_indices": "li"},
    ),
    (
        "masked_fill masked_scatter masked_scatter_backward masked_select native_dropout_backward",
        {"mask": "?"},
    ),
    (
        "nll_loss_backward nll_loss_forward",
        {"target": "lu"},
    ),
    (
        """
            multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward nll_loss2d_backward
            nll_loss2d_forward
        """,
        {"target": "l"},
    ),
    (
        "binary_cross_entropy binary_cross_entropy_backward",
        {"weight": _ANY},
    ),
    (
        """
            mse_loss_backward smooth_l1_loss_backward soft_margin_loss_backward
        """,
        {"target": _NUMBERS},
    ),
    (
        "binary_cross_entropy_with_logits",
        {"weight": _ANY, "pos_weight": _ANY},
    ),
    (
        "_segment_reduce_backward segment_reduce",
        {"lengths": "li", "indices": "li", "offsets": "li"},
    ),
    (
        "linalg_ldl_solve linalg_lu_solve",
        {"pivots": "i"},
    ),
    (
        "_native_multi_head_attention _transformer_encoder_layer_fwd",
        {"mask": _ANY},
    ),
    (
        """
            _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward
            _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
            _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fused_moving_avg_obs_fq_helper
            _fused_moving_avg_obs_fq_helper_functional fake_quantize_per_channel_affine_cachemask
            fake_quantize_per_channel_affine_cachemask_backward fake_quantize_per_tensor_affine_cachemask_backward
        """,
        {"zero_point": _ANY, "mask": _ANY, "fake_quant_enabled": _ANY, "observer_on": _ANY},
    ),
    (
        "_grouped_mm",
        {"offs": "i"},
    ),
    (
        "ldexp",
        {"other": _INTEGERS},
    ),
    (
        "lu_unpack",
        {"LU_pivots": "i"},
    ),
    (
        "repeat_interleave",
        {"repeats": "li"},
    ),
    (
        "searchsorted",
        {"sorter": "l"},
    ),
    (
        "where",
        {"condition": "u?"},
    ),
)
"""Operator -> argument -> its dtypes, for arguments with a dtype of their own, such as indices."""

UNKNOWN = (
    "_assert",
    "_foreach_",
    "_fused_ad",
    "_fused_sgd",
    "_scaled_dot_product_cudnn",
    "_scaled_dot_product_efficient",
    "_scaled_dot_product_flash_attention.",
    "_scaled_dot_product_flash_attention_backward.",
    "_scaled_dot_product_fused",
    "mkldnn_",
)
"""Prefixes of operators without rules: foreach operators, whose parts are checked one by one, and CUDA's."""

TAKEN: Mapping[str, str] = _by_name(
    (
        """
            cumprod.cast cumsum.cast linspace.cast logspace.cast
            _trilinear abs addbmm addcmul addmm addmv affine_grid_generator argmax argmin baddbmm bmm bucketize ceil
            clamp.Tensor div.Tensor_mode dot floor floor_divide fmod.Tensor hardtanh index_reduce isin kthvalue
            linalg_cross max_pool2d_with_indices max_pool3d_with_indices median mm mv mvlgamma nanmedian neg positive
            pow.Tensor_Tensor reflection_pad1d reflection_pad2d reflection_pad3d relu remainder.Tensor
            replication_pad1d replication_pad2d replication_pad3d round.default rsub searchsorted.Tensor sub
            threshold_backward topk trace trunc vdot
        """,
        _NUMBERS,
    ),
    (
        """
            _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
            _batch_norm_with_update_functional _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward
            _embedding_bag_forward_only _fused_rms_norm _fused_rms_norm_backward _histogramdd_from_bin_tensors
            _log_softmax _log_softmax_backward_data _native_batch_norm_legit _native_batch_norm_legit_functional
            _native_batch_norm_legit_no_training _prelu_kernel _prelu_kernel_backward _safe_softmax
            _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
            _segment_reduce_backward _softmax _softmax_backward_data
            _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
            adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward addcdiv
            binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits celu
            convolution_backward dist elu elu_backward frac fractional_max_pool2d fractional_max_pool2d_backward
            fractional_max_pool3d fractional_max_pool3d_backward frexp gelu gelu_backward glu glu_backward
            grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward hann_window.cast
            hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward
            hardtanh_backward histc histogram.bins_tensor huber_loss huber_loss_backward hypot igamma igammac
            leaky_relu leaky_relu_backward
            lerp linalg_matrix_exp linalg_vector_norm log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2
            logcumsumexp logit_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward max_unpool2d
            max_unpool3d mean mish mish_backward mse_loss mse_loss_backward native_batch_norm
            native_batch_norm_backward native_dropout native_group_norm native_group_norm_backward native_layer_norm
            native_layer_norm_backward nextafter nll_loss2d_backward nll_loss2d_forward nll_loss_backward
            nll_loss_forward norm reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward renorm
            replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward round.decimals
            rrelu_with_noise_backward segment_reduce sigmoid_backward silu silu_backward smooth_l1_loss
            smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softplus softplus_backward softshrink
            softshrink_backward std std_mean tanh_backward upsample_bicubic2d_backward upsample_bilinear2d_backward
            upsample_linear1d upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward
            upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d_backward var var_mean
        """,
        _FLOATS,
    ),
    (
        """
            _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d
            upsample_bilinear2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        """,
        "fdhbu",
    ),
    (
        """
            _cdist_backward _cdist_forward _fft_r2c _histogramdd_bin_edges _histogramdd_from_bin_cts _linalg_det
            _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _pdist_backward _pdist_forward
            _upsample_bicubic2d_aa_backward
            _upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa_backward cholesky cholesky_inverse cholesky_solve
            geqrf histogram.bin_ct linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex
            linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_pinv linalg_qr
            linalg_solve_triangular multi_margin_loss multi_margin_loss_backward
            linalg_polar multilabel_margin_loss_forward ormqr polar triangular_solve
        """,
        "fd",
    ),
    (
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa",
        "fdu",
    ),
    (
        "complex view_as_complex",
        "fdh",
    ),
    (
        "rrelu_with_noise rrelu_with_noise_functional",
        "fdb",
    ),
    (
        "avg_pool3d avg_pool3d_backward",
        "fdl",
    ),
    (
        "avg_pool2d avg_pool2d_backward convolution.dilated convolution.transposed",
        "fdhbl",
    ),
    (
        "convolution",
        _NUMBERS,
    ),
    (
        "col2im im2col",
        "fdhb?",
    ),
    (
        "threshold",
        "fdhblisc",
    ),
    (
        """
            special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
            special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
            special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
            special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
            special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
            special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
            special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
            special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta
        """,
        "fdliscu?",
    ),
    (
        "__and__ __or__ __xor__ bitwise_and bitwise_not bitwise_or bitwise_xor",
        _INTEGERS + "?",
    ),
    (
        "bincount bitwise_left_shift bitwise_right_shift gcd lcm",
        _INTEGERS,
    ),
)
"""Operator -> the dtypes that its kernel takes, of an operator that does not take all of them."""
