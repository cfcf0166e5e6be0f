"""Classes of ATen operations, by what they do to a signal."""

# fmt: off

VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "swapaxes", "permute", "movedim", "t",
    "mT", "unsqueeze", "squeeze", "flatten", "unflatten", "as_strided", "expand", "repeat",
    "repeat_interleave", "slice", "narrow", "select", "split", "split_with_sizes", "unsafe_split", "unbind",
    "chunk", "index", "index_select", "gather", "masked_select", "roll", "flip", "constant_pad_nd",
    "reflection_pad2d", "replication_pad2d", "pixel_shuffle", "pixel_unshuffle", "upsample_nearest2d",
    "clone", "contiguous", "_to_copy", "to", "type_as", "alias", "detach", "lift_fresh", "dropout",
    "native_dropout", "masked_fill", "where",
})
"""Pass elements on: moved, copied, cast, masked, cut or repeated."""

CARRIES = VIEWS - {"select", "unbind", "index", "index_select", "gather", "masked_select"}
"""Views that keep a stream, the whole of it or half of its channels."""

COPIES = frozenset({
    "clone", "contiguous", "_to_copy", "to", "type_as", "alias", "detach", "lift_fresh", "dropout",
    "native_dropout", "masked_fill", "where",
})
"""Views that change neither shape nor order."""

RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})

REDUCTIONS = frozenset({
    "mean", "sum", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm", "amax", "max",
})
POOLS = frozenset({
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "_adaptive_avg_pool2d",
    "adaptive_avg_pool2d", "_adaptive_avg_pool3d",
})
"""Averages over positions, channel by channel."""

SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
BOUNDED = SOFTMAXES | {"sigmoid", "tanh", "hardsigmoid", "topk"}
"""Have a bounded result: a factor on their argument does not multiply the result."""

BENDING = BOUNDED | {
    "relu", "relu6", "gelu", "silu", "exp", "hardtanh", "leaky_relu", "elu", "celu", "selu", "mish",
    "softplus", "hardswish", "_prelu_kernel", "log_sigmoid_forward", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
}
"""Nonlinearities."""

POSITIVE = frozenset({"exp", "exp2", "softplus", "sigmoid"})
"""Positive functions: a parameter that goes through one represents a rate by its logarithm, or similar."""

HOMOGENEOUS = frozenset({"relu", "leaky_relu", "_prelu_kernel"})
"""Nonlinearities that commute with a positive factor."""

SUMS = frozenset({"add", "sub", "write", "copy"})
"""Sums of all of their terms."""
ADDITIONS = frozenset({"add", "sub", "rsub"})
MULTIPLICATIONS = frozenset({
    "mul", "div", "_prelu_kernel", "prelu", "lerp", "pow", "addcmul", "addcdiv",
})
JOINTS = frozenset({
    "cat", "stack", "where", "masked_fill", "masked_scatter", "index_put", "copy", "write", "slice_scatter",
})
"""Put one signal next to another."""

LOOKUPS = frozenset({
    "index", "index_select", "gather", "take", "embedding", "_embedding_bag", "_embedding_bag_forward_only",
})
CONVOLUTIONS = frozenset({"convolution", "_convolution"})

PRODUCTS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "_grouped_mm": (0, 1), "addmm": (1, 2),
    "baddbmm": (1, 2), "addmv": (1, 2), "_addmm_activation": (1, 2),
}
"""Matrix products: positions of the two factors."""

CELLS = {"_thnn_fused_lstm_cell": (3, 4), "_thnn_fused_gru_cell": (3, 4)}
"""A step of a recurrent layer on a GPU: positions of the biases."""

NORMS = {
    "native_layer_norm": (0, 2, 3), "_fused_rms_norm": (0, 2, None), "rms_norm": (0, 2, None),
    "native_group_norm": (0, 1, 2), "batch_norm": (0, 1, 2), "native_batch_norm": (0, 1, 2),
    "cudnn_batch_norm": (0, 1, 2), "_native_batch_norm_legit": (0, 1, 2),
    "_native_batch_norm_legit_no_training": (0, 1, 2), "_batch_norm_no_update": (0, 1, 2),
    "_batch_norm_with_update": (0, 1, 2),
}
"""Fused normalisations: positions of the signal, the gain and the shift."""
