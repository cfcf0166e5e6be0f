"""Classes of ATen operations, by what they do to a signal."""


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


COPIES = _names(
    "clone contiguous _to_copy to type_as alias detach lift_fresh dropout native_dropout masked_fill where"
)
"""Views that change neither shape nor order."""

RESHAPES = _names("view _unsafe_view reshape _reshape_alias")

PICKS = _names("select unbind index index_select gather masked_select")
"""Views that pick some elements."""

VIEWS = (COPIES | RESHAPES | PICKS) | _names(
    "transpose swapaxes permute movedim t mT unsqueeze squeeze flatten unflatten as_strided expand repeat",
    "repeat_interleave slice narrow split split_with_sizes unsafe_split chunk roll flip constant_pad_nd",
    "reflection_pad2d replication_pad2d pixel_shuffle pixel_unshuffle upsample_nearest2d",
)
"""Pass elements on: moved, copied, cast, masked, cut or repeated."""

REPLAYED = _names(
    "transpose swapaxes permute t unsqueeze squeeze expand repeat slice narrow select split",
    "split_with_sizes unsafe_split unbind chunk roll flip",
)
"""Views that `elements.follow` applies to labels by their own code."""

CARRIES = VIEWS - PICKS
"""Views that keep a stream, the whole of it or half of its channels."""

REDUCTIONS = _names("mean sum var var_mean std std_mean linalg_vector_norm norm amax max")
POOLS = _names(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d",
    "_adaptive_avg_pool2d _adaptive_avg_pool3d",
)
"""Averages over positions, channel by channel."""

SOFTMAXES = _names("_softmax _safe_softmax softmax")
BOUNDED = SOFTMAXES | _names("sigmoid tanh hardsigmoid topk")
"""Have a bounded result: a factor on their argument does not multiply the result."""

BENDING = BOUNDED | _names(
    "relu relu6 gelu silu exp hardtanh leaky_relu elu celu selu mish softplus hardswish _prelu_kernel",
    "log_sigmoid_forward _thnn_fused_lstm_cell _thnn_fused_gru_cell",
)
"""Nonlinearities."""

POSITIVE = _names("exp exp2 softplus sigmoid")
"""Positive functions: a parameter that goes through one represents a rate by its logarithm, or similar."""

HOMOGENEOUS = _names("relu leaky_relu _prelu_kernel")
"""Nonlinearities that commute with a positive factor."""

SUMS = _names("add sub write copy")
"""Sums of all of their terms."""
ADDITIONS = _names("add sub rsub")
MULTIPLICATIONS = _names("mul div _prelu_kernel prelu lerp pow addcmul addcdiv")
JOINTS = _names("cat stack where masked_fill masked_scatter index_put copy write slice_scatter")
"""Put one signal next to another."""

LOOKUPS = _names("index index_select gather take embedding _embedding_bag _embedding_bag_forward_only")
CONVOLUTIONS = _names("convolution _convolution")

PRODUCTS = dict.fromkeys(_names("mm bmm mv _grouped_mm"), (0, 1)) | dict.fromkeys(
    _names("addmm baddbmm addmv _addmm_activation"), (1, 2)
)
"""Matrix products: positions of the two factors."""

CELLS = dict.fromkeys(_names("_thnn_fused_lstm_cell _thnn_fused_gru_cell"), (3, 4))
"""A step of a recurrent layer on a GPU: positions of the biases."""

NORMS: dict[str, tuple[int, int, int | None]] = {
    "native_layer_norm": (0, 2, 3),
    "_fused_rms_norm": (0, 2, None),
    "rms_norm": (0, 2, None),
    **dict.fromkeys(
        _names(
            "native_group_norm batch_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit",
            "_native_batch_norm_legit_no_training _batch_norm_no_update _batch_norm_with_update",
        ),
        (0, 1, 2),
    ),
}
"""Fused normalisations: positions of the signal, the gain and the shift."""
